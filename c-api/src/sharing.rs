//! Memory of several processes.

use std::ffi::c_char;
use std::time::Duration;

use front::{ImportOptions, Owner, OwnerDeath, Result, Ticket};

use crate::failure::{call, invalid};
use crate::handle::{self, get, make, place, put};
use crate::memory::highwater_buffer;
use crate::numbers::{
    HIGHWATER_OWNER_DEATH_INHERIT, HIGHWATER_OWNER_DEATH_KEEP, HIGHWATER_OWNER_DEATH_RELEASE, highwater_status,
};
use crate::opening::highwater_runtime;
use crate::texts;

fn owner_of(buffer: &front::DeviceBuffer<u8>) -> Result<Owner> {
    buffer.owner().ok_or_else(|| {
        invalid("the buffer has no other owner", "pass a buffer that highwater_ticket_open opened in another process")
    })
}

/// Makes a ticket that lets other processes open the buffer: a text without line breaks. Work that was enqueued on the buffer
/// before is done when they have opened it. Release the text with highwater_text_release.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_buffer_share(
    buffer: *mut highwater_buffer,
    ticket: *mut *mut c_char,
) -> highwater_status {
    call!(highwater_buffer_share, {
        let buffer = get(buffer)?;
        place(ticket, "ticket")?;
        texts::give(ticket, &buffer.share()?.to_string());
        Ok(())
    })
}

/// Opens the buffer of a ticket. The memory stays until every process has released it. `owner_death` is
/// HIGHWATER_OWNER_DEATH_KEEP, _RELEASE or _INHERIT: what happens to the memory when its owner dies.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_ticket_open(
    runtime: *mut highwater_runtime,
    ticket: *const c_char,
    owner_death: u32,
    buffer: *mut *mut highwater_buffer,
) -> highwater_status {
    call!(highwater_ticket_open, {
        let runtime = get(runtime)?;
        let Some(ticket) = handle::text(ticket, "ticket")? else {
            return Err(invalid("the ticket is null, expected a text", "pass the text of highwater_buffer_share"));
        };
        let death = match owner_death {
            HIGHWATER_OWNER_DEATH_KEEP => OwnerDeath::Keep,
            HIGHWATER_OWNER_DEATH_RELEASE => OwnerDeath::Release,
            HIGHWATER_OWNER_DEATH_INHERIT => OwnerDeath::Inherit,
            other => {
                return Err(invalid(
                    format!("owner_death is {other}, expected one of HIGHWATER_OWNER_DEATH_..."),
                    "use a constant of the header",
                ));
            }
        };
        let ticket: Ticket = ticket.trim().parse()?;
        make(buffer, || runtime.open_shared_with::<u8>(&ticket, &ImportOptions::new().with_owner_death(death)))
    })
}

/// Writes whether the process that owns the memory of an opened buffer is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_buffer_owner_is_alive(
    buffer: *mut highwater_buffer,
    alive: *mut bool,
) -> highwater_status {
    call!(highwater_buffer_owner_is_alive, {
        let owner = owner_of(get(buffer)?)?;
        place(alive, "answer")?;
        put(alive, owner.is_alive());
        Ok(())
    })
}

/// Waits for the death of the process that owns the memory of an opened buffer, for at most some milliseconds. Writes whether it
/// is dead.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_buffer_owner_wait(
    buffer: *mut highwater_buffer,
    milliseconds: u64,
    dead: *mut bool,
) -> highwater_status {
    call!(highwater_buffer_owner_wait, {
        let owner = owner_of(get(buffer)?)?;
        place(dead, "answer")?;
        put(dead, owner.wait(Duration::from_millis(milliseconds))?);
        Ok(())
    })
}
