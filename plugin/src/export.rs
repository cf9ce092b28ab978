//! The plugin's end: the functions of the table, over any `dyn Backend`, and the entry point.
//!
//! A plugin has its own copy of everything in this crate: statics, thread-locals, the tags' counter. So ids are translated on
//! their way through, and log lines are handed to the program.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use super::codes::{Coded, PANICKED};
use super::cross::{Answer, Argument, HandlePtr, Tags, Wrong};
use super::logging;
use super::raw::{RawBackend, RawError, RawHandle, RawHost, RawOpen, RawPlugin, Text, read_sized, write_sized};
use super::table::{TABLE_VERSIONS, Table, receiver_type, slots};
use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BackendTag, BlasHandle, BlasOptions, Capabilities, CaptureMode, Completion,
    DeviceInfo, DevicePtr, Error, EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId, HostAllocator,
    HostOptions, HostPtr, Identity, IpcSharing, LiveObjects, MathMode, MemoryCopy, MemoryFill, MemoryHandle,
    MemoryInfo, PlanArguments, PlanId, PlanOptions, Result, StreamId, StreamOptions, Transport, Workspace,
};

/// What [`export_backend!`](crate::export_backend) exports.
#[derive(Debug)]
pub struct Export {
    /// The name under which it is opened.
    pub name: &'static CStr,
    /// What it drives, for people.
    pub description: &'static CStr,
    /// Who made it.
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
    fn host(&self) -> &dyn HostAllocator {
        &*self.host
    }

    fn sharing(&self) -> Result<&dyn IpcSharing> {
        self.sharing.as_deref().ok_or_else(|| Error::lacks("ipc_sharing", "ipc_transports"))
    }

    fn create_handle(&self, device: u32, options: &BlasOptions) -> Result<HandlePtr> {
        let handle = self.backend.create_blas_handle(device, options)?;
        let exported = Box::new(ExportedHandle { handle, tags: self.tags });
        Ok(HandlePtr(NonNull::from(Box::leak(exported)).cast()))
    }
}

/// A handle that the program has.
struct ExportedHandle {
    handle: Box<dyn BlasHandle>,
    tags: Tags,
}

/// What the pointers that come back stand for.
mod receive {
    use super::*;

    fn null<T>() -> Result<T, Wrong> {
        Err(Wrong::from("a null pointer for the backend or the handle".to_owned()))
    }

    /// # Safety
    /// Null, or what `open` gave and `close` was not called with.
    pub(super) unsafe fn backend<'a>(pointer: *mut RawBackend) -> Result<(&'a Exported, Tags), Wrong> {
        // SAFETY: the caller vouches; it is only ever shared.
        let exported = unsafe { pointer.cast::<Exported>().as_ref() };
        exported.map_or_else(null, |exported| Ok((exported, exported.tags)))
    }

    /// # Safety
    /// As [`backend`], and nobody uses it any more.
    pub(super) unsafe fn owned_backend(pointer: *mut RawBackend) -> Result<(Box<Exported>, Tags), Wrong> {
        if pointer.is_null() {
            return null();
        }
        // SAFETY: the caller vouches; `open` made it of a box.
        let exported = unsafe { Box::from_raw(pointer.cast::<Exported>()) };
        let tags = exported.tags;
        Ok((exported, tags))
    }

    /// # Safety
    /// Null, or what `create_handle` gave and `handle_close` was not called with; one thread at a time.
    pub(super) unsafe fn handle<'a>(
        pointer: *mut RawHandle,
    ) -> Result<(&'a mut (dyn BlasHandle + 'static), Tags), Wrong> {
        // SAFETY: the caller vouches, and uses it in one thread at a time.
        let exported = unsafe { pointer.cast::<ExportedHandle>().as_mut() };
        exported.map_or_else(null, |exported| Ok((&mut *exported.handle, exported.tags)))
    }

    /// # Safety
    /// As [`handle`], and nobody uses it any more.
    pub(super) unsafe fn owned_handle(pointer: *mut RawHandle) -> Result<(Box<ExportedHandle>, Tags), Wrong> {
        if pointer.is_null() {
            return null();
        }
        // SAFETY: the caller vouches; `create_handle` made it of a box.
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

/// An answer that did not fit.
fn unanswered(what: String) -> Error {
    Error::from(Wrong::from(what))
}

/// Runs the inside of a function of the table: errors become codes and texts, and so do panics.
#[inline]
fn answering(error: *mut RawError, inside: impl FnOnce() -> Result<()>) -> i32 {
    match catch_unwind(AssertUnwindSafe(inside)) {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => tell(error, &failure),
        Err(payload) => tell_panic(error, payload),
    }
}

#[cold]
fn tell(error: *mut RawError, failure: &Error) -> i32 {
    // The kinds have small numbers.
    let code = failure.kind().code().cast_signed();
    fill(error, failure.code(), failure.message(), failure.hint());
    code
}

#[cold]
fn tell_panic(error: *mut RawError, payload: Box<dyn std::any::Any + Send>) -> i32 {
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
    // Where there is no room for the words, the code alone has to do.
    // SAFETY: the caller of the table gives null or a struct that is as large as it says.
    let _ = unsafe { write_sized(error, &raw) };
}

/// Says which type the inside of a slot gives.
#[inline]
fn outcome<T>(outcome: Result<T>) -> Result<T> {
    outcome
}

macro_rules! functions {
    ($($(#[doc = $doc:literal])+ $group:ident $receiver:ident $name:ident $operation:literal
        ($($argument:ident: $type:ty),*) $(-> $answer:ty)? $body:block)+) => {
        /// The functions of the table.
        mod functions {
            use super::*;

            $(
                $(#[doc = $doc])+
                ///
                /// # Safety
                /// The pointers are what the header says of them, and the conditions of the trait's method hold.
                pub(super) unsafe extern "C" fn $name(
                    receiver: *mut receiver_type!($receiver)
                    $(, $argument: <$type as Argument>::Abi)*
                    $(, answer: *mut <$answer as Answer>::Slot)?
                    , error: *mut RawError
                ) -> i32 {
                    answering(error, || {
                        #[allow(unused_variables, reason = "where nothing else crosses")]
                        // SAFETY: the caller vouches.
                        let ($receiver, tags) = unsafe { receive::$receiver(receiver) }?;
                        $(
                            // SAFETY: the caller vouches.
                            let $argument = unsafe { <$type as Argument>::lift($argument, tags) }?;
                        )*
                        #[allow(clippy::let_unit_value, unused_variables, reason = "where there is no answer")]
                        let outcome = outcome($body)?;
                        $(
                            // SAFETY: the caller vouches.
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

/// What the program is told of a plugin, for the life of the process.
struct Told {
    export: &'static Export,
    plugin: RawPlugin,
}

// SAFETY: the pointers are to statics.
unsafe impl Send for Told {}
// SAFETY: as above, and nobody writes there.
unsafe impl Sync for Told {}

/// A library is one plugin.
static TOLD: OnceLock<Told> = OnceLock::new();

/// The inside of the entry point.
///
/// # Safety
/// `host` is null or good for as many bytes as it says.
pub unsafe fn enter(host: *const RawHost, export: &'static Export) -> *const RawPlugin {
    let inside = || {
        // Captures of the program and of other plugins.
        highwater_hal::copies::note();
        let mut spare = MaybeUninit::uninit();
        // SAFETY: the caller vouches.
        if let Ok(RawHost { log: Some(log), .. }) = unsafe { read_sized(host, &mut spare) } {
            logging::forward_to(*log);
        }
        let told = TOLD.get_or_init(|| Told {
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
        &raw const told.plugin
    };
    catch_unwind(AssertUnwindSafe(inside)).unwrap_or(std::ptr::null())
}

unsafe extern "C" fn table(version: u32) -> *const Table {
    if TABLE_VERSIONS.contains(&version) { &raw const TABLE } else { std::ptr::null() }
}

/// # Safety
/// The pointers are null or good for what the header says of them.
unsafe extern "C" fn open(request: *const RawOpen, backend: *mut *mut RawBackend, error: *mut RawError) -> i32 {
    answering(error, || {
        let mut spare = MaybeUninit::uninit();
        // SAFETY: the caller vouches.
        let request = unsafe { read_sized(request, &mut spare) }.map_err(unanswered)?;
        let (Some(told), Some(program)) = (TOLD.get(), BackendTag::from_number(request.tag)) else {
            return Err(unanswered("opened before the entry point was called, or with the tag 0".to_owned()));
        };
        if !TABLE_VERSIONS.contains(&request.version) || backend.is_null() || !backend.is_aligned() {
            return Err(unanswered(format!("opened for version {} of the table, or without a place", request.version)));
        }
        let opened = (told.export.open)()?;
        let tags = Tags { program, own: opened.identity().tag };
        let (host, sharing) = (opened.host_allocator(), opened.ipc_sharing());
        let exported = Box::new(Exported { backend: opened, host, sharing, tags });
        // SAFETY: checked above, and the caller vouches for the rest.
        unsafe { backend.write(Box::into_raw(exported).cast()) };
        Ok(())
    })
}

/// Makes a crate of the type `cdylib` a plugin of Highwater: exports the one symbol by which programs find a backend.
///
/// `open` is a function without arguments that gives `Result<Arc<dyn Backend>, E>`, where `E` becomes an
/// [`Error`](highwater_hal::Error) by `Into`. The texts are literals, or macros that give one. Panics of the backend are caught and
/// told to the program, which then does not call the plugin any more.
///
/// Such a library must never be unloaded, and programs never do so. Link it with `-z nodelete`, so that nobody else can, by this
/// line of its build script: `println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");`.
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
        /// The entry point of the plugin, see `highwater.h`.
        ///
        /// # Safety
        /// `host` is null or good for as many bytes as it says.
        // SAFETY: no other symbol of that name is in the library: two plugins in one library do not link.
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
            // SAFETY: the caller vouches.
            unsafe { $crate::abi::enter(host, &EXPORT) }
        }
    };
}

/// A text of a plugin as C has it.
///
/// # Panics
/// At compile time, where the text has a NUL inside.
#[must_use]
pub const fn c_text(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a text of a plugin has a NUL inside"),
    }
}
