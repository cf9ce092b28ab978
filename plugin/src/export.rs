//! The plugin's end: the functions of the table over any `dyn Backend`, and the entry point.
//!
//! A plugin has its own copy of this crate, including statics, thread-locals and the counter of tags. So this end translates
//! the tags of ids, and forwards log lines to the program.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use super::codes::{Coded, PANICKED};
use super::logging;
use super::marshalling::{Answer, Argument, HandlePtr, Tags, Wrong};
use super::raw::{
    RawBackend, RawError, RawHandle, RawHost, RawOpen, RawPlugin, RawTable, Text, read_sized, write_sized,
};
use super::table::{TABLE_VERSIONS, Table, receiver_type, slots};
use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BackendTag, BlasHandle, BlasOptions, Capabilities, CaptureMode, Completion,
    DeviceInfo, DevicePtr, Error, EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId, HostAllocator,
    HostOptions, HostPtr, Identity, IpcSharing, LiveObjects, MathMode, MemoryCopy, MemoryCopy2d, MemoryFill,
    MemoryHandle, MemoryInfo, MemoryRange, PhysicalMemoryId, PhysicalMemoryOptions, PlanArguments, PlanId, PlanOptions,
    Result, StreamId, StreamOptions, Transport, Workspace,
};

/// The arguments of [`export_backend!`](crate::export_backend).
#[derive(Debug)]
pub struct Export {
    /// The name that opens it.
    pub name: &'static CStr,
    /// The product that it drives, for people.
    pub description: &'static CStr,
    /// Its maker.
    pub vendor: &'static CStr,
    /// Its version.
    pub version: &'static CStr,
    /// Opens the backend.
    pub open: fn() -> Result<Arc<dyn Backend>>,
}

/// A backend that the program has open.
struct Exported {
    backend: Arc<dyn Backend>,
    host: Arc<dyn HostAllocator>,
    sharing: Option<Arc<dyn IpcSharing>>,
    tags: Tags,
}

impl Deref for Exported {
    type Target = dyn Backend;

    fn deref(&self) -> &Self::Target {
        &*self.backend
    }
}

impl Exported {
    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<HandlePtr> {
        let handle = self.backend.create_blas_handle(device, options)?;
        let exported = Box::new(ExportedHandle { handle, tags: self.tags });
        Ok(HandlePtr(NonNull::from(Box::leak(exported)).cast()))
    }
}

/// A handle that the program has open.
struct ExportedHandle {
    handle: Box<dyn BlasHandle>,
    tags: Tags,
}

/// Conversion of the program's pointers to their objects.
mod receive {
    use super::*;

    fn null<T>() -> Result<T> {
        Err(unanswered("a null pointer for the backend or the handle".to_owned()))
    }

    /// # Safety
    /// The pointer must be null, or come from `open` and not have been passed to `close`.
    pub(super) unsafe fn backend<'a>(pointer: *mut RawBackend) -> Result<(&'a Exported, Tags)> {
        // SAFETY: the caller ensures it, and the object is only shared.
        let exported = unsafe { pointer.cast::<Exported>().as_ref() };
        exported.map_or_else(null, |exported| Ok((exported, exported.tags)))
    }

    /// # Safety
    /// As for [`backend`].
    pub(super) unsafe fn host<'a>(pointer: *mut RawBackend) -> Result<(&'a dyn HostAllocator, Tags)> {
        // SAFETY: the caller ensures it.
        unsafe { backend(pointer) }.map(|(exported, tags)| (&*exported.host, tags))
    }

    /// # Safety
    /// As for [`backend`].
    pub(super) unsafe fn sharing<'a>(pointer: *mut RawBackend) -> Result<(&'a dyn IpcSharing, Tags)> {
        // SAFETY: the caller ensures it.
        let (exported, tags) = unsafe { backend(pointer) }?;
        let sharing = exported.sharing.as_deref().ok_or_else(|| Error::lacks("ipc_sharing", "ipc_transports"))?;
        Ok((sharing, tags))
    }

    /// # Safety
    /// As for [`backend`], and no other call may use the pointer from here on.
    pub(super) unsafe fn owned_backend(pointer: *mut RawBackend) -> Result<(Box<Exported>, Tags)> {
        if pointer.is_null() {
            return null();
        }
        // SAFETY: the caller ensures it, and `open` made the pointer from a box.
        let exported = unsafe { Box::from_raw(pointer.cast::<Exported>()) };
        let tags = exported.tags;
        Ok((exported, tags))
    }

    /// # Safety
    /// The pointer must be null, or come from `create_handle` and not have been passed to `handle_close`. One thread at a time
    /// may use it.
    pub(super) unsafe fn handle<'a>(pointer: *mut RawHandle) -> Result<(&'a mut (dyn BlasHandle + 'static), Tags)> {
        // SAFETY: the caller ensures it, including that one thread at a time uses the handle.
        let exported = unsafe { pointer.cast::<ExportedHandle>().as_mut() };
        exported.map_or_else(null, |exported| Ok((&mut *exported.handle, exported.tags)))
    }

    /// # Safety
    /// As for [`handle`], and no other call may use the pointer from here on.
    pub(super) unsafe fn owned_handle(pointer: *mut RawHandle) -> Result<(Box<ExportedHandle>, Tags)> {
        if pointer.is_null() {
            return null();
        }
        // SAFETY: the caller ensures it, and `create_handle` made the pointer from a box.
        let exported = unsafe { Box::from_raw(pointer.cast::<ExportedHandle>()) };
        let tags = exported.tags;
        Ok((exported, tags))
    }
}

impl From<Wrong> for Error {
    fn from(wrong: Wrong) -> Self {
        Self::new(wrong.kind, "", wrong.what)
            .with_hint("the program and the plugin do not understand each other; update both")
    }
}

/// Returns the error of a value that cannot be passed.
fn unanswered(what: String) -> Error {
    Error::from(Wrong::from(what))
}

/// Runs the body of a function of the table. Converts errors and panics to codes and messages.
#[inline]
fn answering(error: *mut RawError, inside: impl FnOnce() -> Result<()>) -> i32 {
    match catch_unwind(AssertUnwindSafe(inside)) {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => report(error, &failure),
        Err(payload) => report_panic(error, payload),
    }
}

#[cold]
fn report(error: *mut RawError, failure: &Error) -> i32 {
    // The numbers of the kinds are small.
    let code = failure.kind().code().cast_signed();
    fill(error, failure.code(), failure.message(), failure.hint());
    code
}

#[cold]
fn report_panic(error: *mut RawError, payload: Box<dyn std::any::Any + Send>) -> i32 {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a text");
    fill(error, None, text, "");
    // Its destructor could panic too.
    std::mem::forget(payload);
    PANICKED
}

fn fill(error: *mut RawError, code: Option<i64>, message: &str, hint: &str) {
    let raw = RawError {
        size: size_of::<RawError>() as u64,
        vendor_code: code.unwrap_or(0),
        has_vendor_code: u32::from(code.is_some()),
        reserved: 0,
        message: Text::new(message),
        hint: Text::new(hint),
    };
    // Without a struct for the message, the code alone is returned.
    // SAFETY: the program passes null, or a struct that begins with its size.
    let _ = unsafe { write_sized(error, &raw) };
}

/// Fixes the type of a body.
#[inline]
fn outcome<T>(outcome: Result<T>) -> Result<T> {
    outcome
}

/// The body of a slot: its own, or the call of the method.
macro_rules! body {
    (=> $call:expr) => {
        // SAFETY: the slot has the safety conditions of the trait's method, and the program meets them.
        unsafe { $call }
    };
    ($body:block => $call:expr) => {
        $body
    };
}

macro_rules! functions {
    ($($(#[doc = $doc:literal])+ $group:ident $name:ident: $receiver:ident.$method:ident
        ($($(& $($by:lifetime)?)? $argument:ident: $type:ty),*) $(-> $answer:ty)? $(= $body:block)?;)+) => {
        /// The functions of the table.
        mod functions {
            use super::*;

            $(
                $(#[doc = $doc])+
                ///
                /// # Safety
                /// The caller must pass pointers as the header describes them, and meet the conditions of the trait's method.
                pub(super) unsafe extern "C" fn $name(
                    receiver: *mut receiver_type!($receiver)
                    $(, $argument: <$type as Argument>::Abi)*
                    $(, answer: *mut <$answer as Answer>::Slot)?
                    , error: *mut RawError
                ) -> i32 {
                    answering(error, || {
                        #[allow(unused_variables, reason = "a slot without arguments and answer uses no tags")]
                        // SAFETY: the caller ensures it.
                        let ($receiver, tags) = unsafe { receive::$receiver(receiver) }?;
                        $(
                            // SAFETY: the caller ensures it.
                            let $argument = unsafe { <$type as Argument>::lift($argument, tags) }?;
                        )*
                        #[allow(clippy::let_unit_value, unused_variables, reason = "a slot without an answer")]
                        #[allow(unused_unsafe, reason = "some methods are safe to call")]
                        let outcome = outcome(body!($($body)? => $receiver.$method($($(& $($by)?)? $argument),*)))?;
                        $(
                            // SAFETY: the caller ensures it.
                            unsafe { <$answer as Answer>::put(outcome, answer, tags) }.map_err(unanswered)?;
                        )?
                        Ok(())
                    })
                }
            )+
        }

        /// The table of every plugin that [`export_backend!`](crate::export_backend) makes.
        static TABLE: Table = Table { size: size_of::<Table>() as u64, $($name: Some(functions::$name)),+ };
    };
}
slots!(functions);

/// The plugin's description, which the program reads for the life of the process.
struct Description {
    export: &'static Export,
    plugin: RawPlugin,
}

// SAFETY: the pointers refer to statics.
unsafe impl Send for Description {}
// SAFETY: as above, and nothing writes them.
unsafe impl Sync for Description {}

/// The description of this library's only plugin.
static DESCRIPTION: OnceLock<Description> = OnceLock::new();

/// Runs the entry point.
///
/// # Safety
/// `host` must be null, or point to a struct that begins with its size.
pub unsafe fn enter(host: *const RawHost, export: &'static Export) -> *const RawPlugin {
    let inside = || {
        // The program and other plugins may capture streams.
        highwater_hal::copies::note();
        let mut spare = MaybeUninit::uninit();
        // SAFETY: the caller ensures it.
        if let Ok(RawHost { log: Some(log), .. }) = unsafe { read_sized(host, &mut spare) } {
            logging::forward_to(*log);
        }
        let description = DESCRIPTION.get_or_init(|| Description {
            export,
            plugin: RawPlugin {
                size: size_of::<RawPlugin>() as u64,
                version_min: *TABLE_VERSIONS.start(),
                version_max: *TABLE_VERSIONS.end(),
                name: export.name.as_ptr(),
                description: export.description.as_ptr(),
                vendor: export.vendor.as_ptr(),
                version: export.version.as_ptr(),
                open: Some(open),
                table: Some(table),
            },
        });
        &raw const description.plugin
    };
    catch_unwind(AssertUnwindSafe(inside)).unwrap_or(std::ptr::null())
}

unsafe extern "C" fn table(version: u32) -> *const RawTable {
    if TABLE_VERSIONS.contains(&version) { (&raw const TABLE).cast() } else { std::ptr::null() }
}

/// # Safety
/// The caller must pass null, or pointers as the header describes them.
unsafe extern "C" fn open(request: *const RawOpen, backend: *mut *mut RawBackend, error: *mut RawError) -> i32 {
    answering(error, || {
        let mut spare = MaybeUninit::uninit();
        // SAFETY: the caller ensures it.
        let request = unsafe { read_sized(request, &mut spare) }.map_err(unanswered)?;
        let (Some(description), Some(program)) = (DESCRIPTION.get(), BackendTag::from_number(request.tag)) else {
            return Err(unanswered("opened before the entry point was called, or with the tag 0".to_owned()));
        };
        if !TABLE_VERSIONS.contains(&request.version) || backend.is_null() || !backend.is_aligned() {
            return Err(unanswered(format!("opened for version {} of the table, or without a place", request.version)));
        }
        let opened = (description.export.open)()?;
        let tags = Tags { program, own: opened.identity().tag };
        let (host, sharing) = (opened.host_allocator(), opened.ipc_sharing());
        let exported = Box::new(Exported { backend: opened, host, sharing, tags });
        // SAFETY: checked above, and the caller ensures the rest.
        unsafe { backend.write(Box::into_raw(exported).cast()) };
        Ok(())
    })
}

/// Makes a plugin of a `cdylib` crate. Exports the symbol by which programs find its backend.
///
/// `open` is a function without arguments that returns `Result<Arc<dyn Backend>, E>`. `E` converts to an
/// [`Error`](highwater_hal::Error) by `Into`. The texts are literals, or macros that expand to one. A panic of the backend is
/// caught and reported to the program, which then never calls the plugin again.
///
/// Such a library must never be unloaded, and programs never do so. Link it with `-z nodelete`, so that no other code can. This
/// line of its build script does so: `println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");`.
///
/// ```
/// # fn open() -> highwater_hal::Result<std::sync::Arc<dyn highwater_hal::Backend>> {
/// #     Ok(highwater_mock::MockGpu::open(highwater_mock::MockOptions::new())?)
/// # }
/// highwater_plugin::export_backend! {
///     name: "example",
///     description: "A device for examples",
///     vendor: "Example Ltd",
///     version: env!("CARGO_PKG_VERSION"),
///     open: open,
/// }
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! export_backend {
    (
        name: $name:expr,
        description: $description:expr,
        vendor: $vendor:expr,
        version: $version:expr,
        open: $open:expr $(,)?
    ) => {
        /// The entry point of the plugin. See `highwater.h`.
        ///
        /// # Safety
        /// `host` must be null, or point to a struct that begins with its size.
        // SAFETY: the library has no other symbol of this name, because two plugins in one library do not link.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn highwater_plugin(host: *const $crate::abi::RawHost) -> *const $crate::abi::RawPlugin {
            static EXPORT: $crate::abi::Export = $crate::abi::Export {
                name: $crate::abi::c_text(concat!($name, "\0")),
                description: $crate::abi::c_text(concat!($description, "\0")),
                vendor: $crate::abi::c_text(concat!($vendor, "\0")),
                version: $crate::abi::c_text(concat!($version, "\0")),
                open: || {
                    let open = $open;
                    open()
                        .map(|backend| backend as ::std::sync::Arc<dyn $crate::abi::Backend>)
                        .map_err(::std::convert::Into::into)
                },
            };
            // SAFETY: the caller ensures it.
            unsafe { $crate::abi::enter(host, &EXPORT) }
        }
    };
}

/// Returns a text of a plugin as a C string.
///
/// # Panics
/// At compile time, if the text has a NUL inside.
#[must_use]
pub const fn c_text(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a text of a plugin has a NUL inside"),
    }
}
