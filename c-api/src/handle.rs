//! Opaque handles, and the pointers that C passes.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ffi::{CStr, c_char};
use std::mem::size_of;
use std::sync::atomic::{AtomicU64, Ordering};

use front::hal::fork::Generation;
use front::{Error, ErrorKind, Result};

use crate::failure::{ARGUMENT, invalid};

/// A kind of handle. C sees it as an incomplete struct: a pointer to it is one to a [`Handle`] of the object.
pub(crate) trait Kind {
    /// The object behind a handle. Any thread may use it.
    type Object: Send + Sync;
    /// The word at the start of a live object: eight letters.
    const MAGIC: u64;
    /// The name in C.
    const NAME: &'static str;

    /// Returns memory of the object in which its handle lives, from [`make`] to the drop of the object. If there is none, the handle
    /// is allocated.
    #[inline]
    fn memory(_object: &Self::Object) -> Option<*mut [u64; WORDS]> {
        None
    }

    /// Returns whether [`Kind::memory`] returns memory.
    #[inline]
    fn has_memory(_object: &Self::Object) -> bool {
        false
    }
}

/// Words of [`Kind::memory`].
pub(crate) const WORDS: usize = 6;

/// What the word becomes at the release.
const RELEASED: u64 = u64::from_ne_bytes(*b"released");

/// An object behind a handle. The word at its start tells a live object from another kind and from a released one, as far as memory
/// that was freed can tell.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Handle<T> {
    magic: AtomicU64,
    generation: Generation,
    value: T,
}

/// Declares the kinds of handles: the object, the word, and the functions for [`Kind::memory`] and [`Kind::has_memory`].
macro_rules! kinds {
    ($($name:ident: $object:ty = $magic:literal $(in $memory:path, if $has_memory:path)?;)+) => {
        $(
            impl crate::handle::Kind for $name {
                type Object = $object;
                const MAGIC: u64 = u64::from_ne_bytes(*$magic);
                const NAME: &'static str = stringify!($name);
                $(
                    #[inline]
                    fn memory(object: &$object) -> Option<*mut [u64; crate::handle::WORDS]> {
                        $memory(object)
                    }

                    #[inline]
                    fn has_memory(object: &$object) -> bool {
                        $has_memory(object)
                    }
                )?
            }
        )+
    };
}
pub(crate) use kinds;

#[cold]
fn null(name: &str, expected: &str, hint: &str) -> Error {
    invalid(format!("the {name} is null, expected {expected}"), hint)
}

#[cold]
fn stale<K: Kind>(found: u64) -> Error {
    let found = match found {
        RELEASED => "a released handle".to_owned(),
        _ => "a pointer that is no such handle".to_owned(),
    };
    let name = K::NAME;
    Error::new(ErrorKind::InvalidHandle, ARGUMENT, format!("{found}, expected a live {name}"))
        .with_hint(format!("pass a {name} that was made and not released, of this library"))
}

#[inline]
fn checked<'a, K: Kind>(handle: *mut K) -> Result<&'a Handle<K::Object>> {
    let handle = handle.cast::<Handle<K::Object>>();
    if handle.is_null() {
        return Err(null(
            K::NAME,
            "a live handle",
            "check the status of the call that makes it; a release sets a handle to null",
        ));
    }
    if !handle.is_aligned() {
        return Err(stale::<K>(0));
    }
    // SAFETY: The caller of the header's function passes a handle. Every kind begins with its word.
    let magic = unsafe { &*handle.cast::<AtomicU64>() }.load(Ordering::Relaxed);
    if magic != K::MAGIC {
        return Err(stale::<K>(magic));
    }
    // SAFETY: The word names this type, and the caller releases no handle during a call on it.
    Ok(unsafe { &*handle })
}

/// Returns a handle of this process.
#[inline]
fn live<'a, K: Kind>(handle: *mut K) -> Result<&'a Handle<K::Object>> {
    let handle = checked(handle)?;
    // A child must not reach a lock that a thread of the parent may hold.
    if handle.generation.is_current() { Ok(handle) } else { Err(Generation::error(ARGUMENT)) }
}

/// As [`get`], for a handle in a field of a struct, which errors name.
///
/// # Safety
/// As for [`get`].
pub(crate) unsafe fn get_field<'a, K: Kind>(handle: *mut K, field: &str) -> Result<&'a K::Object> {
    let name = K::NAME;
    // SAFETY: As the caller promises.
    unsafe { get(handle) }.map_err(|error| match error.kind() {
        ErrorKind::InvalidArgument => invalid(format!("{field} is null, expected a live {name}"), error.hint()),
        ErrorKind::InvalidHandle => {
            Error::new(ErrorKind::InvalidHandle, ARGUMENT, format!("{field} is {}", error.message()))
                .with_hint(error.hint())
        }
        _ => error,
    })
}

/// Returns the object of a handle.
///
/// # Safety
/// The caller must pass a pointer as the header describes it, and end the borrow with the call.
#[inline]
pub(crate) unsafe fn get<'a, K: Kind>(handle: *mut K) -> Result<&'a K::Object> {
    live(handle).map(|handle| &handle.value)
}

/// As [`get`], for a call of the object that refuses a forked child itself, before it takes a lock. The generation is then checked once.
///
/// # Safety
/// As for [`get`].
#[inline]
pub(crate) unsafe fn get_for_checked_call<'a, K: Kind>(handle: *mut K) -> Result<&'a K::Object> {
    checked(handle).map(|handle| &handle.value)
}

/// Checks a place for an answer, before the work whose answer it gets.
#[inline]
pub(crate) fn place<T>(place: *mut T, name: &str) -> Result<()> {
    if place.is_null() || !place.is_aligned() { Err(no_place(name)) } else { Ok(()) }
}

#[cold]
fn no_place(name: &str) -> Error {
    invalid(
        format!("the place for the {name} is null or misaligned, expected an address to write it to"),
        "pass the address of a variable of that type",
    )
}

/// Writes an answer.
///
/// # Safety
/// The caller must pass a place that [`place`] has checked.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) {
    // SAFETY: As the caller promises.
    unsafe { place.write(value) }
}

/// Makes a handle of what `make` returns, and writes it to `slot`.
///
/// # Safety
/// The caller must pass a place as the header describes it.
#[inline]
pub(crate) unsafe fn make<K: Kind>(slot: *mut *mut K, make: impl FnOnce() -> Result<K::Object>) -> Result<()> {
    // SAFETY: As the caller promises.
    unsafe { make_in(Generation::current(), slot, make) }
}

/// As [`make`], from the object of another handle, whose generation is checked once for both.
///
/// # Safety
/// The caller must pass a handle and a place as the header describes them.
#[inline]
pub(crate) unsafe fn make_from<P: Kind, K: Kind>(
    parent: *mut P,
    slot: *mut *mut K,
    make: impl FnOnce(&P::Object) -> Result<K::Object>,
) -> Result<()> {
    let parent = live(parent)?;
    // SAFETY: As the caller promises.
    unsafe { make_in(parent.generation, slot, || make(&parent.value)) }
}

/// As [`make_from`], for a `make` that refuses a forked child itself, before it takes a lock. The generation is then checked once.
///
/// # Safety
/// As for [`make_from`].
#[inline]
pub(crate) unsafe fn make_from_checked_call<P: Kind, K: Kind>(
    parent: *mut P,
    slot: *mut *mut K,
    make: impl FnOnce(&P::Object) -> Result<K::Object>,
) -> Result<()> {
    let parent = checked(parent)?;
    // SAFETY: As the caller promises.
    unsafe { make_in(parent.generation, slot, || make(&parent.value)) }
}

/// Makes a handle of the current generation.
///
/// # Safety
/// As for [`make`].
#[inline]
unsafe fn make_in<K: Kind>(
    generation: Generation,
    slot: *mut *mut K,
    make: impl FnOnce() -> Result<K::Object>,
) -> Result<()> {
    place(slot, K::NAME)?;
    let value = make()?;
    // Nothing from here on unwinds, so the object goes from `make` to its place without a copy on the stack.
    let handle = match K::memory(&value) {
        Some(memory) => {
            const {
                assert!(align_of::<Handle<K::Object>>() <= align_of::<u64>());
            }
            memory.cast()
        }
        None => allocate::<K::Object>(),
    };
    // SAFETY: The memory is for this handle alone. The place was checked, and the caller promises that it is one.
    unsafe {
        handle.write(Handle { magic: AtomicU64::new(K::MAGIC), generation, value });
        put(slot, handle.cast());
    }
    Ok(())
}

/// Returns memory for a handle. `extern "C"`, so that the compiler knows that it does not unwind.
extern "C" fn allocate<T>() -> *mut Handle<T> {
    // SAFETY: A handle has bytes.
    let handle = unsafe { alloc(Layout::new::<Handle<T>>()) };
    if handle.is_null() { handle_alloc_error(Layout::new::<Handle<T>>()) } else { handle.cast() }
}

/// Takes the object of a handle, and writes null in its place. `None` if it is null.
///
/// # Safety
/// The caller must pass a place as the header describes it.
#[inline]
pub(crate) unsafe fn take<K: Kind>(slot: *mut *mut K) -> Result<Option<K::Object>> {
    place(slot, K::NAME)?;
    // SAFETY: The place was checked, and the caller promises that it is one.
    let handle = unsafe { slot.read() };
    if handle.is_null() {
        return Ok(None);
    }
    // A load and a store suffice, which cost a third of an exchange: the header forbids calls with the handle during its release, so
    // no other thread reads the word between them.
    checked(handle)?.magic.store(RELEASED, Ordering::Relaxed);
    let handle = handle.cast::<Handle<K::Object>>();
    // SAFETY: `make` made the handle. This call alone ends it, because the word was that of a live handle until now.
    unsafe {
        put(slot, std::ptr::null_mut());
        let value = (&raw const (*handle).value).read();
        if !K::has_memory(&value) {
            dealloc(handle.cast(), Layout::new::<Handle<K::Object>>());
        }
        Ok(Some(value))
    }
}

/// Releases a handle.
///
/// # Safety
/// As for [`take`].
#[inline]
pub(crate) unsafe fn release<K: Kind>(slot: *mut *mut K) -> Result<()> {
    // SAFETY: As the caller promises. In a forked child, drops return at once.
    unsafe { take(slot) }.map(drop)
}

/// A struct that begins with its size, for which all zeros are a value.
///
/// # Safety
/// The struct must be `repr(C)`, begin with a `usize`, and accept zeros in all its fields. Every version must have the first one's bytes.
pub(crate) unsafe trait Options: Copy {
    /// The name in C.
    const NAME: &'static str;
    /// The size of the struct in its first version, which is the least that a program passes.
    const FIRST_SIZE: usize;
}

/// Declares structs of options, each with the last field of its first version and that field's type. The pair stays as it is when a later
/// version adds fields: programs that were compiled before pass the size up to there. A new field begins behind that size, and not in
/// padding before it, because programs leave bytes of padding undefined.
macro_rules! options {
    ($($name:ident up to $last:ident: $type:ty;)+) => {
        $(
            // SAFETY: The struct is `repr(C)`, begins with its size, and has numbers and pointers alone.
            unsafe impl crate::handle::Options for $name {
                const NAME: &'static str = stringify!($name);
                const FIRST_SIZE: usize = (std::mem::offset_of!($name, $last) + size_of::<$type>())
                    .next_multiple_of(align_of::<$name>());
            }
        )+
    };
}
pub(crate) use options;

#[cold]
fn wrong_size<T: Options>(size: usize) -> Error {
    let (name, expected) = (T::NAME, size_of::<T>());
    let hint = format!("set it to sizeof({name}), not to the sizeof of a pointer");
    invalid(format!("{name}.size is {size}, expected {expected}"), &hint)
}

/// Reads a struct of the caller. Fields that later versions have added are zero if the caller's version is older. Fields beyond those that
/// are known must be zero.
///
/// # Safety
/// The caller must pass null, or a struct that begins with its size.
pub(crate) unsafe fn read<T: Options>(given: *const T) -> Result<T> {
    let name = T::NAME;
    if given.is_null() || !given.is_aligned() {
        return Err(null(
            name,
            "the address of such a struct",
            "pass the address of an aligned struct, with its size set",
        ));
    }
    // SAFETY: The caller passes a struct that begins with its size.
    let size = unsafe { given.cast::<usize>().read() };
    // The size of each version is a multiple of the alignment.
    if !(T::FIRST_SIZE..=4096).contains(&size) || size % align_of::<T>() != 0 {
        return Err(wrong_size::<T>(size));
    }
    // SAFETY: As above: the struct has this many bytes.
    let bytes = unsafe { std::slice::from_raw_parts(given.cast::<u8>(), size) };
    if bytes.iter().skip(size_of::<T>()).any(|&byte| byte != 0) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            ARGUMENT,
            format!("{name} sets fields after its first {} bytes, which this library does not know", size_of::<T>()),
        )
        .with_hint("use a newer library, or leave the new fields zero"));
    }
    let mut known = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: Both have at least this many bytes. Zeros are a value of every field, and so are the bytes that the caller wrote.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), known.as_mut_ptr().cast(), size.min(size_of::<T>()));
        Ok(known.assume_init())
    }
}

/// Returns a text of the caller.
///
/// # Safety
/// The caller must pass null, or a text that ends with NUL.
pub(crate) unsafe fn text<'a>(given: *const c_char, name: &str) -> Result<Option<&'a str>> {
    if given.is_null() {
        return Ok(None);
    }
    // SAFETY: As the caller promises.
    let text = unsafe { CStr::from_ptr(given) }.to_str();
    text.map(Some).map_err(|error| {
        let message = format!("the {name} is not UTF-8: no character begins at byte {}", error.valid_up_to());
        invalid(message, "pass a text in UTF-8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blas::highwater_gemm;
    use crate::memory::highwater_copy_shape;
    use crate::opening::highwater_open_options;

    /// A struct that two versions have extended.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct grown {
        size: usize,
        first: u32,
        second: u64,
        third: u32,
        fourth: u64,
    }

    options! {
        grown up to first: u32;
    }

    fn of_size(size: usize) -> Result<grown> {
        let given = grown { size, first: 1, second: 2, third: 3, fourth: 4 };
        // SAFETY: It is such a struct, and has at least the bytes that this test names.
        unsafe { read(&raw const given) }
    }

    #[test]
    fn each_version_of_a_struct_is_read_and_no_shorter_one() {
        assert_eq!((grown::FIRST_SIZE, size_of::<grown>()), (16, 40));
        assert_eq!(of_size(16).unwrap(), grown { size: 16, first: 1, second: 0, third: 0, fourth: 0 });
        assert_eq!(of_size(32).unwrap(), grown { size: 32, first: 1, second: 2, third: 3, fourth: 0 });
        assert_eq!(of_size(40).unwrap(), grown { size: 40, first: 1, second: 2, third: 3, fourth: 4 });
        for size in [0, 8, 12, 20, 39, 4104, usize::MAX] {
            let error = of_size(size).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert_eq!(error.message(), format!("grown.size is {size}, expected 40"));
            assert!(error.hint().contains("sizeof(grown)"), "{error}");
        }
    }

    /// The sizes of version 0.1, which programs that are compiled with it pass to every later version.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn the_sizes_of_the_first_versions_stay() {
        assert_eq!(highwater_open_options::FIRST_SIZE, 80);
        assert_eq!(highwater_copy_shape::FIRST_SIZE, 40);
        assert_eq!(highwater_gemm::FIRST_SIZE, 168);
    }
}
