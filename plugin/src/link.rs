//! The program's end of an open backend in a plugin: one call for each slot, which lowers the arguments, crosses, and checks
//! the answer.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use super::codes::{Coded, PANICKED};
use super::marshalling::{Answer, Argument, HandlePtr};
use super::raw::{RawBackend, RawError, RawHandle};
use super::table::{Table, receiver_type, slots};
use highwater_hal::exit;
use highwater_hal::{
    AllocateOptions, AtomicsMode, BackendTag, BlasOptions, Capabilities, CaptureMode, Completion, DeviceInfo,
    DevicePtr, Error, ErrorKind, EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId, HostOptions, HostPtr,
    Identity, LiveObjects, MathMode, MemoryCopy, MemoryFill, MemoryHandle, MemoryInfo, PlanArguments, PlanId,
    PlanOptions, Result, StreamId, StreamOptions, Transport, Workspace,
    fork::{Generation, Guard},
};

/// What became of a plugin that panicked: it is not called again, by any of its backends.
#[derive(Debug, Default)]
pub(super) struct Poison {
    poisoned: AtomicBool,
    /// In which slot, and its words.
    what: OnceLock<(&'static str, String)>,
}

impl Poison {
    fn set(&self, slot: &'static str, words: String) {
        // The first one stands.
        let _ = self.what.set((slot, words));
        self.poisoned.store(true, Ordering::Release);
    }

    /// The error of a call that is not made for it.
    pub(super) fn error(&self, plugin: &str, operation: &'static str) -> Option<Error> {
        if !self.poisoned.load(Ordering::Acquire) {
            return None;
        }
        let (slot, words) = self.what.get().map_or(("?", ""), |(slot, words)| (*slot, words.as_str()));
        let message = format!("the plugin `{plugin}` panicked in `{slot}` and is not called any more: {words}");
        Some(
            Error::new(ErrorKind::InvalidState, operation, message)
                .with_hint("restart the process, and report it to the plugin's maker"),
        )
    }
}

/// An open backend in a plugin.
#[derive(Debug)]
pub(super) struct Link {
    plugin: Arc<str>,
    table: Table,
    backend: NonNull<RawBackend>,
    tag: BackendTag,
    /// 0 until it was asked for.
    devices: AtomicU32,
    guard: Guard,
    poison: Arc<Poison>,
}

// SAFETY: the pointer is only handed to the table's functions, which may be called from any thread (the table's contract).
unsafe impl Send for Link {}
// SAFETY: as above, also at once.
unsafe impl Sync for Link {}

/// How the words of a failed call reach the program: room for each thread, so that no call has to clear it.
struct ErrorRoom(UnsafeCell<RawError>);

thread_local! {
    static ERROR: ErrorRoom = const { ErrorRoom(UnsafeCell::new(RawError::EMPTY)) };
}

/// This thread's room for an error, emptied.
#[inline]
pub(super) fn error_room() -> *mut RawError {
    // Without a destructor it is there for the whole life of the thread.
    let room = ERROR.with(|room| room.0.get());
    // SAFETY: the room is this thread's, and written through raw pointers only. A call within a call, from a log line's
    // receiver, writes into it too; then the words of the outer one are lost, and nothing else.
    unsafe {
        (*room).size = size_of::<RawError>() as u64;
        (*room).vendor_code = 0;
        (*room).has_vendor_code = 0;
        (*room).message.0[0] = 0;
        (*room).hint.0[0] = 0;
    }
    room
}

impl Link {
    /// The end of a backend that was just opened. From here on it is closed when the link is dropped.
    pub(super) fn new(
        plugin: Arc<str>,
        table: Table,
        backend: NonNull<RawBackend>,
        tag: BackendTag,
        poison: Arc<Poison>,
    ) -> Self {
        let guard = Guard::new();
        Self { plugin, table, backend, tag, devices: AtomicU32::new(0), guard, poison }
    }

    /// The tag in every id of the backend.
    #[inline]
    pub(super) fn tag(&self) -> BackendTag {
        self.tag
    }

    /// Number of devices, once it was asked for.
    #[inline]
    pub(super) fn devices(&self) -> u32 {
        // Relaxed: it is written once, before the backend is given to anybody.
        self.devices.load(Ordering::Relaxed)
    }

    pub(super) fn set_devices(&self, count: u32) {
        self.devices.store(count, Ordering::Relaxed);
    }

    /// The backend itself, as the receiver of calls.
    #[inline]
    pub(super) fn backend(&self) -> *mut RawBackend {
        self.backend.as_ptr()
    }

    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    pub(super) fn plugin(&self) -> &str {
        &self.plugin
    }

    /// What tells the plugin that a descriptor was closed.
    pub(super) fn release_of(self: &Arc<Self>, token: u64) -> Option<DescriptorRelease> {
        (token != 0).then(|| DescriptorRelease { link: Arc::clone(self), token })
    }

    /// Whether the plugin may be called.
    #[inline(always)]
    fn enter(&self, operation: &'static str) -> Result<()> {
        // Relaxed: a call that crosses the panic of another thread finds the plugin as that call left it, whenever it comes.
        if self.poison.poisoned.load(Ordering::Relaxed) || !self.guard.is_current() || exit::has_begun() {
            return Err(self.out_of_service(operation));
        }
        Ok(())
    }

    #[cold]
    fn out_of_service(&self, operation: &'static str) -> Error {
        if !self.guard.is_current() {
            return Generation::error(operation);
        }
        self.poison.error(&self.plugin, operation).unwrap_or_else(|| shutting_down(operation))
    }

    #[cold]
    fn missing(&self, operation: &'static str, slot: &'static str) -> Error {
        let message = format!("the plugin `{}` does not offer `{slot}`", self.plugin);
        Error::new(ErrorKind::Unsupported, operation, message).with_hint("use another backend, or a newer plugin")
    }

    #[cold]
    fn failed(&self, operation: &'static str, slot: &'static str, code: i32, room: *const RawError) -> Error {
        failure(&self.plugin, &self.poison, operation, slot, code, room)
    }

    /// An answer that cannot be.
    #[cold]
    pub(super) fn broken(&self, operation: &'static str, slot: &'static str, what: &str) -> Error {
        let message = format!("the plugin `{}` answered in `{slot}` with {what}", self.plugin);
        Error::new(ErrorKind::Vendor, operation, message).with_hint(BROKEN)
    }
}

/// The error of a call that comes too late.
#[cold]
pub(super) fn shutting_down(operation: &'static str) -> Error {
    Error::new(ErrorKind::ShuttingDown, operation, "the process is exiting, and plugins are not called any more")
        .with_hint("end the work on the device before `main` returns")
}

/// What a call that answered another code than 0 has to say. `room` is this thread's.
#[cold]
pub(super) fn failure(
    plugin: &str,
    poison: &Poison,
    operation: &'static str,
    slot: &'static str,
    code: i32,
    room: *const RawError,
) -> Error {
    // SAFETY: the room is this thread's, and every byte of it is initialised.
    let raw = unsafe { room.read() };
    let (message, hint) = (raw.message.read_cut(), raw.hint.read_cut());
    if code == PANICKED {
        poison.set(slot, raw.message.read_cut());
        if let Some(error) = poison.error(plugin, operation) {
            return error;
        }
    }
    let Some(kind) = u32::try_from(code).ok().and_then(ErrorKind::of) else {
        let message =
            format!("the plugin `{plugin}` answered {code} in `{slot}`, which is no code: {}", raw.message.read_cut());
        return Error::new(ErrorKind::Vendor, operation, message).with_code(i64::from(code)).with_hint(BROKEN);
    };
    let error = Error::new(kind, operation, message).with_hint(hint);
    if raw.has_vendor_code == 1 { error.with_code(raw.vendor_code) } else { error }
}

const BROKEN: &str = "the plugin breaks its contract: report it to its maker";

/// One call: `-> ()` is a slot without an answer.
macro_rules! call {
    ($link:ident, $operation:literal, $name:ident, $receiver:ident, ($($argument:ident: $type:ty),*)) => {{
        $link.enter($operation)?;
        let Some(slot) = $link.table.$name else { return Err($link.missing($operation, stringify!($name))) };
        $(let $argument = <$type as Argument>::form($argument);)*
        let error = error_room();
        // SAFETY: the receiver is the backend's or a live handle of it, the arguments are as the header says, and what they
        // point to lives until the call returns. What the plugin makes of them is what whoever loaded it vouches for.
        let code = unsafe { slot($receiver $(, <$type as Argument>::abi(&$argument))*, error) };
        if code == 0 { Ok(()) } else { Err($link.failed($operation, stringify!($name), code, error)) }
    }};
    ($link:ident, $operation:literal, $name:ident, $receiver:ident, ($($argument:ident: $type:ty),*), $answer:ty) => {{
        $link.enter($operation)?;
        let Some(slot) = $link.table.$name else { return Err($link.missing($operation, stringify!($name))) };
        $(let $argument = <$type as Argument>::form($argument);)*
        let mut answer = <$answer as Answer>::empty();
        let error = error_room();
        // SAFETY: as above; there is room for the answer.
        let code = unsafe { slot($receiver $(, <$type as Argument>::abi(&$argument))*, &raw mut answer, error) };
        if code != 0 {
            return Err($link.failed($operation, stringify!($name), code, error));
        }
        <$answer as Answer>::lift(answer, $link).map_err(|what| $link.broken($operation, stringify!($name), &what))
    }};
}

/// What a call gives.
macro_rules! answer_type {
    () => {
        ()
    };
    ($answer:ty) => {
        $answer
    };
}

macro_rules! calls {
    ($($(#[doc = $doc:literal])+ $group:ident $receiver:ident $name:ident $operation:literal
        ($($argument:ident: $type:ty),*) $(-> $answer:ty)? $body:block)+) => {
        /// One call for each slot.
        #[allow(dead_code, reason = "`close` is called when the link is dropped, by hand")]
        impl Link {
            $(
                $(#[doc = $doc])+
                #[inline]
                pub(super) fn $name(
                    self: &Arc<Self>,
                    $receiver: *mut receiver_type!($receiver)
                    $(, $argument: &$type)*
                ) -> Result<answer_type!($($answer)?)> {
                    call!(self, $operation, $name, $receiver, ($($argument: $type),*) $(, $answer)?)
                }
            )+
        }
    };
}
slots!(calls);

impl Drop for Link {
    fn drop(&mut self) {
        const OPERATION: &str = "close";
        // Where the plugin may not be called, what it holds is left to the end of the process.
        if self.enter(OPERATION).is_err() {
            return;
        }
        let Some(close) = self.table.close else { return };
        let error = error_room();
        // SAFETY: the backend is alive, and this is the last that anybody has of it.
        let code = unsafe { close(self.backend.as_ptr(), error) };
        if code != 0 {
            let error = self.failed(OPERATION, "close", code, error);
            tracing::warn!("a backend could not be closed: {error}");
        }
    }
}

/// Tells the plugin, when it is dropped, that the program has closed a descriptor of its.
#[derive(Debug)]
pub(crate) struct DescriptorRelease {
    link: Arc<Link>,
    token: u64,
}

impl Drop for DescriptorRelease {
    fn drop(&mut self) {
        // In a process that exits or was forked there is nobody to tell.
        if self.link.enter("release_descriptor").is_ok()
            && let Err(error) = self.link.release_descriptor(self.link.backend(), &self.token)
        {
            tracing::warn!("a descriptor could not be released: {error}");
        }
    }
}
