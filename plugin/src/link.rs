//! The program's end of an open backend in a plugin. The call of each slot lowers the arguments, calls the plugin, and checks
//! the answer.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use super::codes::{Coded, PANICKED};
use super::marshalling::{Answer, Argument, HandlePtr, are_alike};
use super::raw::{RawBackend, RawError, RawHandle};
use super::rules;
use super::table::{Table, receiver_type, slots};
use highwater_hal::exit;
use highwater_hal::{
    AllocateOptions, AtomicsMode, BackendTag, BlasOptions, Capabilities, CaptureMode, Completion, DeviceInfo,
    DevicePtr, Error, ErrorKind, EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId, HostOptions, HostPtr,
    Identity, LiveObjects, MathMode, MemoryCopy, MemoryCopy2d, MemoryFill, MemoryHandle, MemoryInfo, MemoryRange,
    PhysicalMemoryId, PhysicalMemoryOptions, PlanArguments, PlanId, PlanOptions, Result, StreamId, StreamOptions,
    Transport, Workspace,
    fork::{Generation, Guard},
};

/// The state of a plugin that panicked. No backend of it is called again.
#[derive(Debug, Default)]
pub(super) struct Poison {
    poisoned: AtomicBool,
    /// The slot of the panic, and its message.
    what: OnceLock<(&'static str, String)>,
}

impl Poison {
    fn set(&self, slot: &'static str, words: String) {
        // The first panic is kept.
        let _ = self.what.set((slot, words));
        self.poisoned.store(true, Ordering::Release);
    }

    /// Returns the error of a call after the panic, or `None` if there was no panic.
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
    /// The number of devices; 0 until it is known.
    devices: AtomicU32,
    guard: Guard,
    poison: Arc<Poison>,
    /// Set if the rules of the table are checked: [`rules`](super::rules).
    checks_rules: bool,
    /// The first fault of a call whose error no caller gets.
    unseen: OnceLock<Error>,
}

// SAFETY: the pointer is only passed to the table's functions, which any thread may call (the table's contract).
unsafe impl Send for Link {}
// SAFETY: as above, and several threads may call them at once.
unsafe impl Sync for Link {}

/// The struct for the details of an error. Each thread has one, so that no call has to clear all of it.
struct ErrorRoom(UnsafeCell<RawError>);

thread_local! {
    static ERROR: ErrorRoom = const { ErrorRoom(UnsafeCell::new(RawError::EMPTY)) };
}

/// Returns this thread's struct for an error, cleared.
#[inline]
pub(super) fn error_room() -> *mut RawError {
    // It has no destructor, so it lives as long as the thread.
    let room = ERROR.with(|room| room.0.get());
    // SAFETY: the struct is this thread's, and written through raw pointers only. A nested call, from a receiver of log
    // lines, writes into it too. Then the outer call loses its message, and nothing else.
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
    /// Takes ownership of a backend that was just opened. Dropping the link closes it.
    pub(super) fn new(
        plugin: Arc<str>,
        table: Table,
        backend: NonNull<RawBackend>,
        tag: BackendTag,
        poison: Arc<Poison>,
    ) -> Self {
        let (guard, checks_rules) = (Guard::new(), rules::are_checked());
        let devices = AtomicU32::new(0);
        Self { plugin, table, backend, tag, devices, guard, poison, checks_rules, unseen: OnceLock::new() }
    }

    /// Returns the tag in every id of the backend.
    #[inline]
    pub(super) fn tag(&self) -> BackendTag {
        self.tag
    }

    /// Returns the number of devices, once it is known.
    #[inline]
    pub(super) fn devices(&self) -> u32 {
        // Relaxed: written once, before the backend is shared.
        self.devices.load(Ordering::Relaxed)
    }

    pub(super) fn set_devices(&self, count: u32) {
        self.devices.store(count, Ordering::Relaxed);
    }

    /// Returns the backend, the receiver of calls.
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

    /// Returns the guard that reports the closing of a descriptor to the plugin; `None` for the token 0.
    pub(super) fn release_of(self: &Arc<Self>, token: u64) -> Option<DescriptorRelease> {
        (token != 0).then(|| DescriptorRelease { link: Arc::clone(self), token })
    }

    /// Checks that the plugin may be called.
    #[inline(always)]
    fn enter(&self, operation: &'static str) -> Result<()> {
        // Relaxed: a call that races with the panic of another thread finds the plugin in the same state before or after it.
        if self.poison.poisoned.load(Ordering::Relaxed) || !self.guard.is_current() || exit::has_begun() {
            return Err(self.out_of_service(operation));
        }
        if self.checks_rules
            && let Some(fault) = self.unseen.get()
        {
            return Err(fault.clone());
        }
        Ok(())
    }

    /// Refuses a call that is answered without the plugin, in a forked child and once the process has begun to exit.
    pub(super) fn check_process(&self, operation: &'static str) -> Result<()> {
        if !self.guard.is_current() {
            return Err(Generation::error(operation));
        }
        if exit::has_begun() { Err(exit::error(operation)) } else { Ok(()) }
    }

    #[cold]
    fn out_of_service(&self, operation: &'static str) -> Error {
        if !self.guard.is_current() {
            return Generation::error(operation);
        }
        self.poison.error(&self.plugin, operation).unwrap_or_else(|| exit::error(operation))
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

    /// Returns the error of a call with an answer. If rules are checked, the answer must be as it was before the call.
    #[cold]
    fn failed_with_answer<T>(
        &self,
        operation: &'static str,
        slot: &'static str,
        code: i32,
        room: *const RawError,
        (answer, before): (&T, &T),
    ) -> Error {
        let error = self.failed(operation, slot, code, room);
        if self.checks_rules && !are_alike(answer, before) {
            let what = format!("an answer, although it returned an error ({error}); expected is an untouched answer");
            return self.broken(operation, slot, &what);
        }
        error
    }

    /// Returns the value, or the default for an error that no caller gets. If rules are checked, every later call returns it.
    pub(super) fn or_unseen<T: Default>(&self, result: Result<T>) -> T {
        result.unwrap_or_else(|error| {
            if self.checks_rules && error.kind() == ErrorKind::Vendor {
                // The first fault is kept.
                let _ = self.unseen.set(error);
            }
            T::default()
        })
    }

    /// Returns whether the error of a refused struct is a fault of the plugin. Its kind is not checked, because another argument may be
    /// wrong too.
    fn is_fault(&self, error: &Error) -> bool {
        error.kind() == ErrorKind::Vendor || self.poison.poisoned.load(Ordering::Relaxed)
    }

    /// Returns the error of a plugin that accepted a struct of a later version.
    #[cold]
    fn accepted(&self, operation: &'static str, slot: &'static str) -> Error {
        let what =
            "success for a longer struct whose unknown bytes are not zero; expected is HW_ERROR_INVALID_ARGUMENT";
        self.broken(operation, slot, what)
    }

    /// Returns the error of an invalid answer.
    #[cold]
    pub(super) fn broken(&self, operation: &'static str, slot: &'static str, what: &str) -> Error {
        let message = format!("the plugin `{}` answered in `{slot}` with {what}", self.plugin);
        Error::new(ErrorKind::Vendor, operation, message).with_hint(BROKEN)
    }
}

/// Returns the error of a call that returned another code than 0. `room` is this thread's struct.
#[cold]
pub(super) fn failure(
    plugin: &str,
    poison: &Poison,
    operation: &'static str,
    slot: &'static str,
    code: i32,
    room: *const RawError,
) -> Error {
    // SAFETY: the struct is this thread's, and every byte of it is initialized.
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
    if rules::are_checked()
        && let Some(fault) = rules::fault_of_error(&raw)
    {
        let message = format!("the plugin `{plugin}` answered in `{slot}` with the error `{kind}` and {fault}");
        return Error::new(ErrorKind::Vendor, operation, message).with_hint(BROKEN);
    }
    let message = if message.is_empty() { format!("the plugin `{plugin}` gave no message") } else { message };
    let error = Error::new(kind, operation, message).with_hint(hint);
    if raw.has_vendor_code == 1 { error.with_code(raw.vendor_code) } else { error }
}

pub(super) const BROKEN: &str = "the plugin breaks its contract: report it to its maker";

/// The call of one slot, without an answer or with one.
macro_rules! call {
    ($link:ident, $operation:expr, $name:ident, $receiver:ident, ($($argument:ident: $type:ty),*)) => {{
        $link.enter($operation)?;
        let Some(slot) = $link.table.$name else { return Err($link.missing($operation, stringify!($name))) };
        $(let $argument = <$type as Argument>::form($argument);)*
        if $link.checks_rules && (false $(|| <$type as Argument>::IS_STRUCT)*) {
            let error = error_room();
            // SAFETY: as below. Each struct is valid for its own, longer size.
            let code = unsafe {
                slot($receiver $(, <$type as Argument>::longer_abi(&$argument, 1, &mut MaybeUninit::uninit()))*, error)
            };
            if code == 0 {
                return Err($link.accepted($operation, stringify!($name)));
            }
            let error = $link.failed($operation, stringify!($name), code, error);
            if $link.is_fault(&error) {
                return Err(error);
            }
            let error = error_room();
            // SAFETY: as above.
            let code = unsafe {
                slot($receiver $(, <$type as Argument>::longer_abi(&$argument, 0, &mut MaybeUninit::uninit()))*, error)
            };
            return if code == 0 { Ok(()) } else { Err($link.failed($operation, stringify!($name), code, error)) };
        }
        let error = error_room();
        // SAFETY: the receiver is the backend or a live handle of it. The arguments are as the header describes them, and their
        // targets live until the call returns. The loader of the plugin vouches for its code.
        let code = unsafe { slot($receiver $(, <$type as Argument>::abi(&$argument))*, error) };
        if code == 0 { Ok(()) } else { Err($link.failed($operation, stringify!($name), code, error)) }
    }};
    ($link:ident, $operation:expr, $name:ident, $receiver:ident, ($($argument:ident: $type:ty),*), $answer:ty) => {{
        $link.enter($operation)?;
        let Some(slot) = $link.table.$name else { return Err($link.missing($operation, stringify!($name))) };
        $(let $argument = <$type as Argument>::form($argument);)*
        let mut answer = <$answer as Answer>::empty();
        if $link.checks_rules && (false $(|| <$type as Argument>::IS_STRUCT)*) {
            let error = error_room();
            // SAFETY: as above, and the answer is writable. Each struct is valid for its own, longer size.
            let code = unsafe {
                slot(
                    $receiver $(, <$type as Argument>::longer_abi(&$argument, 1, &mut MaybeUninit::uninit()))*,
                    &raw mut answer,
                    error,
                )
            };
            if code == 0 {
                return Err($link.accepted($operation, stringify!($name)));
            }
            let before = <$answer as Answer>::empty();
            let error = $link.failed_with_answer($operation, stringify!($name), code, error, (&answer, &before));
            if $link.is_fault(&error) {
                return Err(error);
            }
        }
        if $link.checks_rules && let Some(mut first) = <$answer as Answer>::first() {
            let error = error_room();
            // SAFETY: as above; the slot has the size that it states.
            let code = unsafe { slot($receiver $(, <$type as Argument>::abi(&$argument))*, &raw mut first, error) };
            if code == 0 && let Err(what) = <$answer as Answer>::check_first(&first) {
                return Err($link.broken($operation, stringify!($name), &what));
            }
        }
        let error = error_room();
        let code = if $link.checks_rules {
            // SAFETY: as above.
            unsafe {
                slot(
                    $receiver $(, <$type as Argument>::longer_abi(&$argument, 0, &mut MaybeUninit::uninit()))*,
                    &raw mut answer,
                    error,
                )
            }
        } else {
            // SAFETY: as above, and the answer is writable.
            unsafe { slot($receiver $(, <$type as Argument>::abi(&$argument))*, &raw mut answer, error) }
        };
        if code != 0 {
            let before = <$answer as Answer>::empty();
            return Err($link.failed_with_answer($operation, stringify!($name), code, error, (&answer, &before)));
        }
        <$answer as Answer>::lift(answer, $link).map_err(|what| $link.broken($operation, stringify!($name), &what))
    }};
}

/// The result type of a call.
macro_rules! answer_type {
    () => {
        ()
    };
    ($answer:ty) => {
        $answer
    };
}

/// The name of the method in errors. Methods of the allocator have a prefix, as their slots do.
macro_rules! operation_name {
    (host $name:ident $method:ident) => {
        stringify!($name)
    };
    ($receiver:ident $name:ident $method:ident) => {
        stringify!($method)
    };
}

macro_rules! calls {
    ($($(#[doc = $doc:literal])+ $group:ident $name:ident: $receiver:ident.$method:ident
        ($($(& $($by:lifetime)?)? $argument:ident: $type:ty),*) $(-> $answer:ty)? $(= $body:block)?;)+) => {
        /// The call of each slot.
        #[allow(dead_code, reason = "`drop` calls `close` directly")]
        impl Link {
            $(
                $(#[doc = $doc])+
                #[inline]
                pub(super) fn $name(
                    self: &Arc<Self>,
                    $receiver: *mut receiver_type!($receiver)
                    $(, $argument: &$type)*
                ) -> Result<answer_type!($($answer)?)> {
                    call!(self, operation_name!($receiver $name $method), $name, $receiver, ($($argument: $type),*) $(, $answer)?)
                }
            )+
        }
    };
}
slots!(calls);

impl Drop for Link {
    fn drop(&mut self) {
        const OPERATION: &str = "close";
        // If the plugin may not be called, its objects live until the process ends.
        if self.enter(OPERATION).is_err() {
            return;
        }
        let Some(close) = self.table.close else { return };
        let error = error_room();
        // SAFETY: the backend is alive, and this is its last use.
        let code = unsafe { close(self.backend.as_ptr(), error) };
        if code != 0 {
            let error = self.failed(OPERATION, "close", code, error);
            tracing::warn!("a backend could not be closed: {error}");
        }
    }
}

/// Reports to the plugin, when it is dropped, that the program has closed a descriptor.
#[derive(Debug)]
pub(crate) struct DescriptorRelease {
    link: Arc<Link>,
    token: u64,
}

impl Drop for DescriptorRelease {
    fn drop(&mut self) {
        // A process that exits or was forked reports nothing.
        if self.link.enter("release_descriptor").is_ok()
            && let Err(error) = self.link.release_descriptor(self.link.backend(), &self.token)
        {
            tracing::warn!("a descriptor could not be released: {error}");
        }
    }
}
