//! Memory of several processes, and the processes that own it.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd as _, IntoRawFd as _};
use std::time::Duration;

use front::{DeathWatch, Error, ErrorKind, ImportOptions, Owner, OwnerDeath, Result, Ticket};

use crate::device::highwater_device;
use crate::failure::{ARGUMENT, call, invalid};
use crate::handle::{self, get, make, place, put, release};
use crate::memory::{KeepAlive, Pinned, highwater_buffer, highwater_end_callback, highwater_pinned};
use crate::numbers::{
    HIGHWATER_OWNER_DEATH_INHERIT, HIGHWATER_OWNER_DEATH_KEEP, HIGHWATER_OWNER_DEATH_RELEASE, highwater_status,
};
use crate::opening::highwater_runtime;
use crate::texts;

/// The process that owns opened memory. It keeps no memory, and outlives the buffer.
#[derive(Debug)]
pub enum highwater_owner {}

/// A callback that waits for the death of a process.
#[derive(Debug)]
pub enum highwater_death_watch {}

handle::kinds! {
    highwater_owner: Owner = b"hw-owner";
    highwater_death_watch: DeathWatch = b"hw-death";
}

/// Signals another thread that the owner of memory has died.
pub type highwater_death_callback = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// # Safety
/// The caller must pass null, or a text that ends with NUL.
unsafe fn ticket_of(ticket: *const c_char, made_by: &str) -> Result<Ticket> {
    // SAFETY: As the caller promises.
    let Some(ticket) = (unsafe { handle::text(ticket, "ticket") })? else {
        return Err(invalid("the ticket is null, expected a text", &format!("pass the text of {made_by}")));
    };
    match ticket.trim() {
        "" => Err(invalid(
            format!("the ticket is empty, expected the text of {made_by}"),
            "pass the whole text, and check the call that read it",
        )),
        ticket => ticket.parse(),
    }
}

fn options_of(owner_death: u32) -> Result<ImportOptions> {
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
    Ok(ImportOptions::new().with_owner_death(death))
}

fn owner_of(owner: Option<Owner>, opened_by: &str) -> Result<Owner> {
    owner.ok_or_else(|| {
        let hint = format!("pass memory of another process that {opened_by} opened");
        invalid("this process owns the memory, expected memory of another one", &hint)
    })
}

/// Makes a ticket that lets other processes open the buffer: a text without line breaks. Work that was enqueued on the buffer
/// before is done when they have opened it. Release the text with highwater_text_release.
///
/// The ticket keeps nothing alive: keep the buffer until the others have opened it.
/// HIGHWATER_ERROR_INVALID_ARGUMENT: the buffer is not from highwater_device_allocate_shared, and not adopted.
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
/// HIGHWATER_ERROR_EXPIRED: the owner has ended, or has released the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_ticket_open(
    runtime: *mut highwater_runtime,
    ticket: *const c_char,
    owner_death: u32,
    buffer: *mut *mut highwater_buffer,
) -> highwater_status {
    call!(highwater_ticket_open, {
        let runtime = get(runtime)?;
        let ticket = ticket_of(ticket, "highwater_buffer_share")?;
        let options = options_of(owner_death)?;
        make(buffer, || runtime.open_shared_with::<u8>(&ticket, &options))
    })
}

/// Makes page-locked memory that other processes can open, as one copy for all of them. The bytes are zeros. It is not from the pool:
/// each call makes a file in memory, and registers it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_allocate_shared(
    runtime: *mut highwater_runtime,
    bytes: usize,
    pinned: *mut *mut highwater_pinned,
) -> highwater_status {
    call!(highwater_pinned_allocate_shared, {
        let runtime = get(runtime)?;
        make(pinned, || runtime.pinned_shared::<u8>(bytes).map(Pinned::shared))
    })
}

/// As highwater_pinned_allocate_shared, on the NUMA node of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_device_pinned_allocate_shared(
    device: *mut highwater_device,
    bytes: usize,
    pinned: *mut *mut highwater_pinned,
) -> highwater_status {
    call!(highwater_device_pinned_allocate_shared, {
        let device = get(device)?;
        make(pinned, || device.pinned_shared::<u8>(bytes).map(Pinned::shared))
    })
}

/// Makes a ticket for highwater_pinned_open: a text without line breaks. Release it with highwater_text_release. Device work that was
/// enqueued on the memory before is done when other processes have opened it. `pinned` must come from highwater_pinned_allocate_shared.
/// No other thread may copy to it during the call.
///
/// If `writable` is false, the memory is read-only from this call on, here and in every process, and the CPU must not write it.
/// Otherwise every process may write it. The program must then order the accesses of all processes and devices.
/// HIGHWATER_ERROR_INVALID_STATE: `writable` is true, and the memory was shared as read-only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_share(
    pinned: *mut highwater_pinned,
    writable: bool,
    ticket: *mut *mut c_char,
) -> highwater_status {
    call!(highwater_pinned_share, {
        let Pinned::Shared(shared) = get(pinned)? else {
            return Err(invalid(
                "the memory is from the pool, which other processes cannot open",
                "pass memory of highwater_pinned_allocate_shared",
            ));
        };
        place(ticket, "ticket")?;
        let made = if writable { shared.share_writable()? } else { shared.share()? };
        texts::give(ticket, &made.to_string());
        Ok(())
    })
}

/// Opens the page-locked memory of a ticket of highwater_pinned_share, without a copy. The memory stays until every process has released
/// it or has ended. `owner_death` is HIGHWATER_OWNER_DEATH_KEEP or _INHERIT.
/// HIGHWATER_ERROR_EXPIRED: the owner has ended, or has released the memory. HIGHWATER_ERROR_UNSUPPORTED: HIGHWATER_OWNER_DEATH_RELEASE,
/// because the CPU may read the memory at any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_open(
    runtime: *mut highwater_runtime,
    ticket: *const c_char,
    owner_death: u32,
    pinned: *mut *mut highwater_pinned,
) -> highwater_status {
    call!(highwater_pinned_open, {
        let runtime = get(runtime)?;
        let ticket = ticket_of(ticket, "highwater_pinned_share")?;
        let options = options_of(owner_death)?;
        make(pinned, || runtime.open_pinned_with::<u8>(&ticket, &options).map(Pinned::shared))
    })
}

/// Makes a handle of the process that owns the memory of an opened buffer. HIGHWATER_ERROR_INVALID_ARGUMENT: this process owns it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_buffer_owner(
    buffer: *mut highwater_buffer,
    owner: *mut *mut highwater_owner,
) -> highwater_status {
    call!(highwater_buffer_owner, {
        let buffer = get(buffer)?;
        make(owner, || owner_of(buffer.owner(), "highwater_ticket_open"))
    })
}

/// As highwater_buffer_owner, for page-locked memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_pinned_owner(
    pinned: *mut highwater_pinned,
    owner: *mut *mut highwater_owner,
) -> highwater_status {
    call!(highwater_pinned_owner, {
        let pinned = get(pinned)?;
        make(owner, || owner_of(pinned.owner(), "highwater_pinned_open"))
    })
}

/// Writes the process id of the owner, as this process sees it. Writes 0 for a process of another PID namespace. After the death, the id may
/// name another process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_owner_pid(owner: *mut highwater_owner, pid: *mut u32) -> highwater_status {
    call!(highwater_owner_pid, {
        let owner = get(owner)?;
        place(pid, "process id")?;
        put(pid, owner.pid().unwrap_or(0));
        Ok(())
    })
}

/// Writes whether the owner is alive. A stopped process is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_owner_is_alive(owner: *mut highwater_owner, alive: *mut bool) -> highwater_status {
    call!(highwater_owner_is_alive, {
        let owner = get(owner)?;
        place(alive, "answer")?;
        put(alive, owner.is_alive());
        Ok(())
    })
}

/// Waits for the death of the owner, for at most some milliseconds. Writes whether it is dead.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_owner_wait(
    owner: *mut highwater_owner,
    milliseconds: u64,
    dead: *mut bool,
) -> highwater_status {
    call!(highwater_owner_wait, {
        let owner = get(owner)?;
        place(dead, "answer")?;
        put(dead, owner.wait(Duration::from_millis(milliseconds))?);
        Ok(())
    })
}

/// Writes a descriptor that becomes readable when the owner dies, for poll and epoll: a pidfd. The caller must close it. It may outlive
/// the handle and the runtime.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_owner_descriptor(
    owner: *mut highwater_owner,
    descriptor: *mut c_int,
) -> highwater_status {
    call!(highwater_owner_descriptor, {
        let owner = get(owner)?;
        place(descriptor, "descriptor")?;
        let copy = owner.as_fd().try_clone_to_owned().map_err(|error| {
            Error::new(ErrorKind::OperatingSystem, ARGUMENT, format!("the copy of a descriptor failed: {error}"))
                .with_hint("close descriptors that are not needed, or raise the limit of the process")
        })?;
        put(descriptor, copy.into_raw_fd());
        Ok(())
    })
}

/// Calls `callback` with `user` once when the owner dies, or soon if it is dead. By then, calls on buffers that were opened with
/// HIGHWATER_OWNER_DEATH_RELEASE are refused.
///
/// The sharing thread of the runtime makes the call. Until the callback returns, that thread answers no other process and releases no
/// memory. So the callback should only signal another thread. It may release buffers. It must not throw or jump.
///
/// The release of the watch cancels a call that has not begun, and does not wait for one that has. `user_end`, if not null, is called with
/// `user` exactly once, in any thread. That call comes after the callback has returned, or once no call of it can follow. It also comes if
/// this function fails, or if the runtime ends before the owner. From then on, the caller may free memory of `user`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_owner_on_death(
    owner: *mut highwater_owner,
    callback: highwater_death_callback,
    user: *mut c_void,
    user_end: highwater_end_callback,
    watch: *mut *mut highwater_death_watch,
) -> highwater_status {
    call!(highwater_owner_on_death, {
        let keep = KeepAlive { release: user_end, user };
        let owner = get(owner)?;
        let Some(callback) = callback else {
            return Err(invalid("the callback is null, expected a function that signals a thread", "pass a function"));
        };
        make(watch, || {
            owner.on_death(move || {
                // Moved in whole, so that it ends after the call, or with the closure.
                let keep = keep;
                callback(keep.user);
            })
        })
    })
}

/// Releases the handle, and cancels the call if it has not begun. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_death_watch_release(watch: *mut *mut highwater_death_watch) -> highwater_status {
    call!(highwater_death_watch_release, { release(watch) })
}

/// Releases the handle. Watches stay.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_owner_release(owner: *mut *mut highwater_owner) -> highwater_status {
    call!(highwater_owner_release, { release(owner) })
}

/// Hands all shared memory of the runtime over to an heir: a process that has opened each of its tickets with
/// HIGHWATER_OWNER_DEATH_INHERIT. Nothing is copied, and no open is refused meanwhile. The heir answers the tickets from then on. This
/// process may then end, or use its buffers further. It cannot share memory that it has not shared before.
///
/// The call waits for the device work of this process, and then for an heir, for at most some milliseconds. After an error, this process
/// still owns the memory. HIGHWATER_ERROR_INVALID_STATE: no heir took all of it in time, or nothing is shared.
/// HIGHWATER_ERROR_UNSUPPORTED: some memory is adopted or has no descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn highwater_hand_over(runtime: *mut highwater_runtime, milliseconds: u64) -> highwater_status {
    call!(highwater_hand_over, { get(runtime)?.hand_over(Duration::from_millis(milliseconds)) })
}
