//! The C boundary of the engine for libraries of every vendor: exported functions and their lookup by name, arguments and
//! results that are passed by address, handles, and the structures that all vendors share.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use highwater_simulated_blas::border;
pub use highwater_simulated_blas::border::Function;
pub use highwater_simulated_blas::export;

use crate::pools::{self, Attribute};
use crate::{Answer, Code, process};

/// Runs the body of an exported function and returns 0 or its code. A panic becomes a code, because none may unwind into
/// foreign code.
pub fn guarded(body: impl FnOnce() -> Answer<()>) -> u32 {
    border::guarded(Code::UNKNOWN.0, || body().map_err(|code| code.0))
}

/// Calls of exported functions so far.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of calls of exported functions so far, for tests that count them.
pub fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// Counts and runs a call, unless the variants have a code for the function.
///
/// # Errors
/// That code, or the error of the call.
pub fn unless_injected<T>(function: &str, body: impl FnOnce() -> Answer<T>) -> Answer<T> {
    // Relaxed: the count orders nothing.
    CALLS.fetch_add(1, Ordering::Relaxed);
    match process::injected(function) {
        Some(code) => Err(code),
        None => body(),
    }
}

/// Refuses a null address for a result, before the result is created.
///
/// # Errors
/// 1 for null.
pub fn expect_place<T>(place: *const T) -> Answer<()> {
    if place.is_null() { Err(Code::INVALID_VALUE) } else { Ok(()) }
}

/// Writes an answer.
///
/// # Errors
/// 1 for null.
///
/// # Safety
/// `place` must be null or valid for a write.
pub unsafe fn put<T>(place: *mut T, value: T) -> Answer<()> {
    // SAFETY: forwarded to the caller.
    unsafe { border::put(place, value, Code::INVALID_VALUE) }
}

/// Creates the result of a call, and writes it. Creates nothing if `place` is null.
///
/// # Errors
/// 1 for null, or the error of `make`.
///
/// # Safety
/// `place` must be null or valid for a write.
pub unsafe fn put_new<T>(place: *mut T, make: impl FnOnce() -> Answer<T>) -> Answer<()> {
    expect_place(place)?;
    let made = make()?;
    // SAFETY: forwarded to the caller.
    unsafe { put(place, made) }
}

/// Writes the value of an expression to the address that the caller of an exported function passed; 1 for null.
#[macro_export]
macro_rules! answer {
    ($place:ident = $value:expr) => {{
        let answer = $value;
        // SAFETY: the caller of the exported function must pass null or a valid place.
        unsafe { $crate::border::put($place, answer) }
    }};
}

/// Creates what an expression returns and writes it to a place. Without a place, returns 1 and creates nothing.
#[macro_export]
macro_rules! create {
    ($place:ident = $value:expr) => {
        // SAFETY: the caller of the exported function must pass null or a valid place.
        unsafe { $crate::border::put_new($place, || $value) }
    };
}

/// Writes a result that is optional for the caller.
///
/// # Safety
/// `place` must be null or valid for a write.
pub unsafe fn put_if_wanted<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the caller says that the place is valid when it is not null.
        unsafe { place.write(value) };
    }
}

/// Writes a text with its terminating zero byte, cut to the available space.
///
/// # Errors
/// 1 for null, and if there is no space for the zero byte.
///
/// # Safety
/// `place` must be null or valid for `room` bytes.
pub unsafe fn put_text(place: *mut c_char, room: i32, text: &str) -> Answer<()> {
    let room = usize::try_from(room).ok().filter(|&room| room > 0 && !place.is_null()).ok_or(Code::INVALID_VALUE)?;
    let length = text.len().min(room - 1);
    // SAFETY: the caller says that there is room for so many bytes, and the text is as long.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast(), length);
        place.add(length).write(0);
    }
    Ok(())
}

/// Writes an attribute in its own width.
///
/// # Errors
/// 1 for null.
///
/// # Safety
/// `place` must be null or valid for a write of the attribute.
pub unsafe fn put_attribute(place: *mut c_void, value: Attribute) -> Answer<()> {
    // SAFETY: the caller says so.
    unsafe {
        match value {
            Attribute::Narrow(value) => put(place.cast(), value),
            Attribute::Wide(value) => put(place.cast(), value),
        }
    }
}

/// Writes handles into the available space, null into unused entries, and the number of handles written. If `places` is null,
/// writes the number of handles instead.
///
/// # Errors
/// 1 if `count` is null.
///
/// # Safety
/// `count` must be null or valid for a read and a write. `places` must be null or valid for `*count` writes.
pub unsafe fn put_handles(places: *mut Handle, count: *mut usize, found: &[u64]) -> Answer<()> {
    if places.is_null() {
        // SAFETY: the caller gives a place for the count, or null.
        return unsafe { put(count, found.len()) };
    }
    // SAFETY: the caller says for how many handles there is room.
    let room = unsafe { get(count) }?;
    for index in 0..room {
        let found = found.get(index).map_or(std::ptr::null_mut(), |&number| handle(number));
        // SAFETY: the caller gives room for so many.
        unsafe { places.add(index).write(found) };
    }
    // SAFETY: the place was not null.
    unsafe { put(count, found.len().min(room)) }
}

/// Reads an argument that is passed by address.
///
/// # Errors
/// 1 for null.
///
/// # Safety
/// `place` must be null or valid for a read.
pub unsafe fn get<T: Copy>(place: *const T) -> Answer<T> {
    expect_place(place)?;
    // SAFETY: the caller says that the place is valid when it is not null.
    Ok(unsafe { place.read() })
}

/// Reads an attribute of a memory pool. The attribute's number determines its width.
///
/// # Errors
/// 1 for an unknown attribute, and for null.
///
/// # Safety
/// `place` must be null or valid for a read of the attribute.
pub unsafe fn get_pool_attribute(attribute: u32, place: *const c_void) -> Answer<Attribute> {
    let is_wide = pools::attribute_is_wide(attribute)?;
    // SAFETY: the caller gives the attribute, which has 64 or 32 bits, or null.
    unsafe { if is_wide { get(place.cast()).map(Attribute::Wide) } else { get(place.cast()).map(Attribute::Narrow) } }
}

/// A handle. The engine treats it as a number; the vendors' headers declare a pointer.
pub type Handle = *mut c_void;

/// Returns the number of a handle.
#[must_use]
pub fn number(handle: Handle) -> u64 {
    handle.addr() as u64
}

/// Returns the handle of a number.
#[must_use]
pub fn handle(number: u64) -> Handle {
    std::ptr::without_provenance_mut(number as usize)
}

/// Returns the address of memory as a number.
#[must_use]
pub fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

/// A function of the host: `CUhostFn`, `hipHostFn_t`.
pub type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

/// `CUuuid`, `hipUUID`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Uuid(pub [u8; 16]);

/// `CUipcMemHandle` and `CUipcEventHandle`, `hipIpcMemHandle_t` and `hipIpcEventHandle_t`, which are passed by value.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

/// Looks up a function by name. Writes its address, or null. Writes the status if its address is not null: 0 if the function
/// was found, else 1.
///
/// # Errors
/// 1 if the name or the address for the function is null, 500 if there is no such function.
///
/// # Safety
/// The pointers must be null or valid: the name for a read up to its zero byte, the others for a write.
pub unsafe fn put_function(
    name: *const c_char,
    function: *mut *mut c_void,
    status: *mut u32,
    find: impl FnOnce(&CStr) -> Option<*mut c_void>,
) -> Answer<()> {
    expect_place(name)?;
    expect_place(function)?;
    // SAFETY: the caller gives a text with its zero byte.
    let found = find(unsafe { CStr::from_ptr(name) });
    // SAFETY: the caller gives places for the answers; the status may be null.
    unsafe {
        put(function, found.unwrap_or(std::ptr::null_mut()))?;
        put_if_wanted(status, u32::from(found.is_none()));
    }
    found.map(drop).ok_or(Code::NOT_FOUND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_to_its_room_and_ends_with_a_zero_byte() {
        let mut room: [c_char; 4] = [1; 4];
        for (length, kept) in [(4, "abc"), (3, "ab"), (1, "")] {
            // SAFETY: there is room for so many bytes, and the text ends.
            let seen = unsafe {
                assert_eq!(put_text(room.as_mut_ptr(), length, "abcdef"), Ok(()));
                CStr::from_ptr(room.as_ptr())
            };
            assert_eq!(seen.to_str(), Ok(kept));
        }
        for length in [0, -1] {
            // SAFETY: nothing is written.
            assert_eq!(unsafe { put_text(room.as_mut_ptr(), length, "a") }, Err(Code::INVALID_VALUE));
        }
        // SAFETY: nothing is written.
        assert_eq!(unsafe { put_text(std::ptr::null_mut(), 4, "a") }, Err(Code::INVALID_VALUE));
    }

    #[test]
    fn nothing_is_made_without_a_place_for_it() {
        let mut place = 1;
        // SAFETY: the place is live, or null.
        unsafe {
            assert_eq!(put_new(&mut place, || Ok(2)), Ok(()));
            assert_eq!(put_new(&mut place, || Err(Code::NOT_READY)), Err(Code::NOT_READY));
            assert_eq!(put_new(std::ptr::null_mut::<i32>(), || panic!("made")), Err(Code::INVALID_VALUE));
        }
        assert_eq!(place, 2);
    }

    #[test]
    fn handles_fill_their_room_and_are_counted_without_any() {
        let (mut places, mut count) = ([handle(9); 3], 0);
        // SAFETY: the places are live, and as many as the count says.
        unsafe {
            assert_eq!(put_handles(std::ptr::null_mut(), &mut count, &[1, 2]), Ok(()));
            assert_eq!(std::mem::replace(&mut count, 3), 2);
            assert_eq!(put_handles(places.as_mut_ptr(), &mut count, &[1, 2]), Ok(()));
            assert_eq!((places.map(number), std::mem::replace(&mut count, 1)), ([1, 2, 0], 2));
            assert_eq!(put_handles(places.as_mut_ptr(), &mut count, &[3, 4]), Ok(()));
            assert_eq!((places.map(number), count), ([3, 2, 0], 1));
            let nowhere = std::ptr::null_mut();
            assert_eq!(put_handles(places.as_mut_ptr(), nowhere, &[1]), Err(Code::INVALID_VALUE));
        }
    }

    #[test]
    fn a_function_that_is_not_there_is_null_with_a_status() {
        let answer = |name: *const c_char, wants_status: bool| {
            let (mut function, mut status) = (handle(9), 9);
            let status_place = if wants_status { &raw mut status } else { std::ptr::null_mut() };
            // SAFETY: the texts end, and the places are live or null.
            let answer =
                unsafe { put_function(name, &mut function, status_place, |name| (name == c"a").then(|| handle(5))) };
            (answer, number(function), status)
        };
        assert_eq!(answer(c"a".as_ptr(), true), (Ok(()), 5, 0));
        assert_eq!(answer(c"b".as_ptr(), true), (Err(Code::NOT_FOUND), 0, 1));
        assert_eq!(answer(c"b".as_ptr(), false), (Err(Code::NOT_FOUND), 0, 9));
        assert_eq!(answer(std::ptr::null(), true), (Err(Code::INVALID_VALUE), 9, 9));
    }
}
