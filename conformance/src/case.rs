//! A case: its name, the clauses that it proves, the needs that a backend must meet, and its function.

use std::cell::Cell;
use std::fmt::{self, Debug};
use std::panic::Location;

use highwater_hal::{Backend, Capabilities, DeviceInfo, Error, Identity, Transport};

use crate::peer::Launcher;
use crate::retry::Inconclusive;
use crate::stream_load;

/// A test of one clause of the traits, or a few that belong together.
///
/// Only this crate makes cases; [`cases`](crate::cases) lists them.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Case {
    /// `group.behavior`; unique.
    pub name: &'static str,
    /// The part of the traits that the case tests. The name begins with it.
    pub group: &'static str,
    /// The ids of the clauses that the case proves.
    pub clauses: &'static [&'static str],
    /// The capabilities that a backend must have, or lack, for the case to prove anything.
    pub needs: &'static [Need],
    /// The function of the case.
    pub(crate) run: Run,
}

/// The function of a case.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Run {
    /// Uses the backend only.
    Alone(fn(&dyn Backend) -> CaseResult),
    /// Starts a second process with the same backend.
    WithPeer(fn(&dyn Backend, &Launcher) -> CaseResult),
}

impl Case {
    /// Returns the reason if the case proves nothing about a backend whose devices have these capabilities. The case uses the
    /// first device as device 0.
    #[must_use]
    pub fn unmet(&self, devices: &[Capabilities]) -> Option<String> {
        self.needs.iter().find_map(|need| need.unmet(devices))
    }

    /// Returns whether a run with two devices runs the case a second time, with the devices exchanged. The tables of the other
    /// groups have an axis for the device.
    pub(crate) fn repeats_on_the_second_device(&self) -> bool {
        const ON_BOTH: [&str; 12] = [
            "aftermath",
            "cells",
            "transfers",
            "kinds",
            "pairs",
            "products",
            "refusals",
            "sizes",
            "registrations",
            "stability",
            "handles",
            "fork",
        ];
        !ON_BOTH.contains(&self.group)
    }

    /// Returns whether the case starts a second process, which needs a [`Launcher`].
    #[must_use]
    pub fn needs_launcher(&self) -> bool {
        matches!(self.run, Run::WithPeer(_))
    }
}

/// A condition of a case. If the backend does not meet it, the case is skipped.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Need {
    /// The capability is true on the device of the case.
    Capability {
        /// Its name.
        name: &'static str,
        /// Reads it.
        get: fn(&Capabilities) -> bool,
    },
    /// The capability is false on the device of the case, which uses it anyway.
    Denied {
        /// Its name.
        name: &'static str,
        /// Reads it.
        get: fn(&Capabilities) -> bool,
    },
    /// The backend has at least two devices.
    TwoDevices,
    /// Memory of the device of the case can be shared by this transport.
    Transport(Transport),
}

impl Need {
    /// Returns the reason if a backend whose devices have these capabilities does not meet the need.
    #[must_use]
    pub fn unmet(&self, devices: &[Capabilities]) -> Option<String> {
        // A backend has a device.
        let first = devices.first()?;
        match *self {
            Self::Capability { name, get } if !get(first) => Some(format!("the capability `{name}` is false")),
            Self::Denied { name, get } if get(first) => Some(format!("the capability `{name}` is true")),
            // Calls that name no device, or two, are denied only if each device denies them.
            Self::Denied { name, get } if OF_ALL_DEVICES.contains(&name) && devices.iter().any(get) => {
                Some(format!("the capability `{name}` is true on another device"))
            }
            Self::Transport(transport) if !first.ipc_transports.contains(transport) => {
                Some(format!("the capability `ipc_transports` lacks {transport:?}"))
            }
            Self::TwoDevices if devices.len() < 2 => Some("the backend has one device".to_owned()),
            _ => None,
        }
    }
}

/// Capabilities of calls that name no device, or two.
const OF_ALL_DEVICES: [&str; 4] = ["host_register", "host_register_read_only", "write_combined", "peer_copy"];

/// Needs by name: `has::gemm_f64`, `lacks::capture`, `TWO_DEVICES`.
pub(crate) mod needs {
    use super::Need;

    pub(crate) const TWO_DEVICES: Need = Need::TwoDevices;
    pub(crate) const DESCRIPTORS: Need = Need::Transport(highwater_hal::Transport::Descriptor);

    macro_rules! capability_needs {
        ($($name:ident),* $(,)?) => {
            /// The capability is true.
            #[allow(non_upper_case_globals, reason = "named as the capability")]
            #[allow(dead_code, reason = "a capability may have no case that needs it")]
            pub(crate) mod has {
                use super::Need;
                $(pub(crate) const $name: Need = Need::Capability { name: stringify!($name), get: |c| c.$name };)*
            }
            /// The capability is false.
            #[allow(non_upper_case_globals, reason = "named as the capability")]
            #[allow(dead_code, reason = "a capability may have no case that needs its lack")]
            pub(crate) mod lacks {
                use super::Need;
                $(pub(crate) const $name: Need = Need::Denied { name: stringify!($name), get: |c| c.$name };)*
            }
        };
    }

    capability_needs!(
        gemm_f32,
        gemm_f64,
        gemm_f16,
        gemm_bf16,
        gemm_mixed,
        tf32,
        atomics_mode,
        blas_workspace,
        strided_batch,
        lt_plans,
        capture,
        stream_ordered_memory,
        shareable_memory,
        interprocess_events,
        event_timing,
        stream_priority,
        peer_copy,
        host_register,
        host_register_read_only,
        write_combined,
        legacy_default_stream,
        per_thread_default_stream,
        foreign_objects,
        foreign_memory,
        mapped_memory,
        mapped_memory_rdma,
        set_stream_resets_workspace,
        handle_per_stream,
        create_during_capture,
        host_address_is_device_address,
        event_waits_end_with_peer,
        lt_handle_per_stream,
    );
}

thread_local! {
    /// The needs of the case that this thread runs.
    static NEEDS: Cell<&'static [Need]> = const { Cell::new(&[]) };
}

/// Runs a case with these needs in this thread.
pub(crate) fn during<T>(needs: &'static [Need], run: impl FnOnce() -> T) -> T {
    struct Restored(&'static [Need]);
    impl Drop for Restored {
        fn drop(&mut self) {
            NEEDS.set(self.0);
        }
    }
    let _restored = Restored(NEEDS.replace(needs));
    run()
}

/// Runs a part of the case of this thread on the first two devices, except those that lack a need of the case.
pub(crate) fn on_devices(backend: &dyn Backend, prove: impl Fn(u32) -> CaseResult) -> CaseResult {
    let capabilities = all_capabilities(backend)?;
    for device in 0..capabilities.len().min(2) {
        let mut seen_from_there = capabilities.clone();
        seen_from_there.swap(0, device);
        if NEEDS.get().iter().all(|need| need.unmet(&seen_from_there).is_none()) {
            let device = device as u32;
            prove(device).map_err(|failure| failure.with_details(&format!("on device {device}")))?;
        }
    }
    Ok(())
}

/// Returns the capabilities of each device.
pub(crate) fn all_capabilities(backend: &dyn Backend) -> highwater_hal::Result<Vec<Capabilities>> {
    (0..backend.device_count()).map(|device| backend.capabilities(device)).collect()
}

/// The facts that a backend reports about itself. They must not change.
pub(crate) struct Facts {
    identity: Identity,
    devices: Vec<(DeviceInfo, Capabilities)>,
}

impl Facts {
    pub(crate) fn of(backend: &dyn Backend) -> highwater_hal::Result<Self> {
        let describe = |device| Ok((backend.device_info(device)?, backend.capabilities(device)?));
        let devices = (0..backend.device_count()).map(describe).collect::<highwater_hal::Result<_>>()?;
        Ok(Self { identity: backend.identity().clone(), devices })
    }

    /// Returns the facts that differ from those of the backend now, in words.
    pub(crate) fn changes(&self, backend: &dyn Backend) -> Vec<String> {
        let now = match Self::of(backend) {
            Ok(now) => now,
            Err(error) => return vec![format!("the devices cannot be described after the case: {error}")],
        };
        let mut changes = Vec::new();
        let mut compare = |what: &str, clause: &str, before: &dyn Debug, now: &dyn Debug| {
            let [before, now] = [before, now].map(|fact| format!("{fact:?}"));
            if before != now {
                changes.push(format!("{what} changed during the case (`{clause}`): it was {before}, and is {now}"));
            }
        };
        compare("the identity", "identity.stable", &self.identity, &now.identity);
        compare("the number of devices", "identity.stable", &self.devices.len(), &now.devices.len());
        for (device, (before, now)) in self.devices.iter().zip(&now.devices).enumerate() {
            compare(&format!("the description of device {device}"), "devices.uuid", &before.0, &now.0);
            compare(
                &format!("the table of capabilities of device {device}"),
                "devices.capabilities-stable",
                &before.1,
                &now.1,
            );
        }
        changes
    }
}

/// The result of a case.
pub(crate) type CaseResult = Result<(), Failure>;

/// The reason why a case failed, with the line of the case.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    message: String,
    location: &'static Location<'static>,
    /// Set if the case failed because no attempt was in time.
    inconclusive: Option<Inconclusive>,
    /// True if the case is skipped, and has not failed.
    is_skip: bool,
}

impl Failure {
    #[track_caller]
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self::at(Location::caller(), message)
    }

    /// Appends details to the message.
    pub(crate) fn with_details(mut self, details: &str) -> Self {
        self.message = format!("{}: {details}", self.message);
        self
    }

    /// Creates a failure at another line of the source.
    pub(crate) fn at(location: &'static Location<'static>, message: impl Into<String>) -> Self {
        Self { message: message.into(), location, inconclusive: None, is_skip: false }
    }

    /// Creates a failure of a case of which no attempt was in time.
    pub(crate) fn inconclusive(location: &'static Location<'static>, waits: &str, inconclusive: Inconclusive) -> Self {
        Self { message: waits.to_owned(), location, inconclusive: Some(inconclusive), is_skip: false }
    }

    /// Skips the case, because it proves nothing about this backend for this reason.
    #[track_caller]
    pub(crate) fn skip(reason: impl Into<String>) -> Self {
        Self { is_skip: true, ..Self::new(reason) }
    }

    /// Returns the reason if the case is skipped.
    pub(crate) fn skipped(&self) -> Option<&str> {
        self.is_skip.then_some(self.message.as_str())
    }

    /// Adds the cause. Attempts are also too late if the backend reports completion too early, or if its calls execute the work
    /// themselves.
    pub(crate) fn explained(mut self, backend: &dyn Backend) -> Self {
        if let Some(inconclusive) = self.inconclusive.take() {
            let cause = match (stream_load::completes_early(backend), stream_load::executes_in_the_call(backend)) {
                (Ok(Some(evidence)), _) => evidence,
                (_, Ok(Some(evidence))) => evidence.to_string(),
                _ => inconclusive.to_string(),
            };
            self.message = format!("{}: {cause}", self.message);
        }
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(inconclusive) = &self.inconclusive {
            write!(f, ": {inconclusive}")?;
        }
        write!(f, " ({}:{})", self.location.file(), self.location.line())
    }
}

/// A call failed although it must not.
impl From<Error> for Failure {
    #[track_caller]
    fn from(error: Error) -> Self {
        Self::new(format!("a call failed that must succeed: {error}"))
    }
}

/// Fails the case with a message unless the condition holds.
macro_rules! check {
    ($condition:expr, $($message:tt)+) => {
        let holds: bool = $condition;
        if !holds {
            return Err($crate::case::Failure::new(format!($($message)+)));
        }
    };
}

/// Fails the case with both values unless they are equal.
macro_rules! check_eq {
    ($got:expr, $expected:expr, $($message:tt)+) => {
        match (&$got, &$expected) {
            (got, expected) if *got == *expected => {}
            (got, expected) => {
                let message = format!($($message)+);
                return Err($crate::case::Failure::new(format!("{message}: got {got:?}, expected {expected:?}")));
            }
        }
    };
}

/// Fails the case unless the call gave an error of this kind.
macro_rules! check_error {
    ($result:expr, $kind:ident, $($message:tt)+) => {
        match $result {
            Err(error) if error.kind() == highwater_hal::ErrorKind::$kind => {}
            other => {
                let message = format!($($message)+);
                let got = match other {
                    Ok(_) => "success".to_owned(),
                    Err(error) => format!("`{error}`"),
                };
                let expected = highwater_hal::ErrorKind::$kind;
                return Err($crate::case::Failure::new(format!("{message}: got {got}, expected `{expected}`")));
            }
        }
    };
}

/// Lists the cases of a file: name, clauses, and [`needs`] in brackets, if any. The function of a case has its name, or follows
/// `=>` with the arguments after the backend. A group `with a second process` also receives the launcher.
macro_rules! cases {
    (group $group:literal; $($cases:tt)+) => {
        $crate::case::cases! { of Alone; group $group; $($cases)+ }
    };
    (group $group:literal with a second process; $($cases:tt)+) => {
        $crate::case::cases! { of WithPeer; group $group; $($cases)+ }
    };
    (of $kind:ident; group $group:literal;
        $($name:ident: [$($clause:literal),+] $(needs [$($($need:ident)::+),+])? $(=> $run:ident $arguments:tt)?;)+) => {
        /// The cases of this group.
        pub(crate) const CASES: &[$crate::case::Case] = &[$(
            $crate::case::Case {
                name: concat!($group, ".", stringify!($name)),
                group: $group,
                clauses: &[$($clause),+],
                needs: &[$($($crate::case::needs::$($need)::+),+)?],
                run: $crate::case::Run::$kind($crate::case::cases!(call $kind $name $($run $arguments)?)),
            },
        )+];
    };
    (call $kind:ident $name:ident) => { $name };
    (call Alone $name:ident $run:ident ($($argument:expr),+)) => { |backend| $run(backend, $($argument),+) };
    (call WithPeer $name:ident $run:ident ($($argument:expr),+)) => {
        |backend, launcher| $run(backend, launcher, $($argument),+)
    };
}

pub(crate) use {cases, check, check_eq, check_error};
