//! The gate of a device keeps captures apart from the calls that would lose them.
//!
//! Waiting for a device and destroying a handle lose every open capture on the device, also those of other runtimes. So
//! all runtimes of a process on one device share its gate. They may run over one backend, over two openings of a
//! backend, or over a plugin and a built-in backend. Gates live in the program's copy of this crate, as runtimes do.
//!
//! The UUID and the PCI address identify a physical device. A device without an address is simulated, and belongs to
//! one backend only.
//!
//! No thread waits for captures while it keeps others from beginning, because an open capture may be about to begin
//! another.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use highwater_hal::{BackendTag, DeviceInfo, fork::Generation};

/// The identity of a device in this process.
#[derive(Debug, PartialEq, Eq)]
enum Key {
    Physical { uuid: [u8; 16], place: String },
    Simulated { backend: BackendTag, ordinal: u32 },
}

impl Key {
    fn of(backend: BackendTag, info: &DeviceInfo) -> Self {
        match &info.pci_address {
            Some(place) => Self::Physical { uuid: info.uuid, place: place.clone() },
            None => Self::Simulated { backend, ordinal: info.ordinal },
        }
    }
}

/// The gates of one process.
struct Registry {
    generation: Generation,
    gates: Mutex<Vec<(Key, Weak<DeviceGate>)>>,
}

/// Returns the registry of this process. A forked child makes its own, because a thread of the parent may hold the lock.
fn registry() -> &'static Registry {
    static CURRENT: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());
    let mut current = CURRENT.load(Ordering::Acquire);
    loop {
        // SAFETY: a registry that was stored is never freed.
        if let Some(registry) = unsafe { current.as_ref() }
            && registry.generation.is_current()
        {
            return registry;
        }
        let fresh = Box::into_raw(Box::new(Registry { generation: Generation::current(), gates: Mutex::default() }));
        match CURRENT.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => current = fresh,
            Err(stands) => {
                // SAFETY: the pointer was made above, and no other thread knows it.
                drop(unsafe { Box::from_raw(fresh) });
                current = stands;
            }
        }
    }
}

/// The gate of a device.
#[derive(Debug, Default)]
pub(crate) struct DeviceGate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The number of streams of the device that take part in a capture, or are about to.
    capturing: u32,
    /// The number of running calls during which no capture may begin.
    quiet: u32,
    /// The number of runtimes that wait for captures to end.
    waiting: u32,
}

/// How long a capture that is about to begin makes way for runtimes that wait. The limit serves a capture that an open one
/// waits for: it must begin before that one can end.
const MAKE_WAY: Duration = Duration::from_millis(100);

/// A guard: no capture is open on the device, and none begins until the guard is dropped.
pub(crate) struct Quiet(Arc<DeviceGate>);

impl Drop for Quiet {
    fn drop(&mut self) {
        self.0.state.lock().quiet -= 1;
        self.0.changed.notify_all();
    }
}

impl DeviceGate {
    /// Returns the gate that all users of a device share.
    fn of(backend: BackendTag, info: &DeviceInfo) -> Arc<Self> {
        let key = Key::of(backend, info);
        let mut gates = registry().gates.lock();
        gates.retain(|(_, gate)| gate.strong_count() > 0);
        if let Some(gate) = gates.iter().find(|(known, _)| *known == key).and_then(|(_, gate)| gate.upgrade()) {
            return gate;
        }
        let gate = Arc::new(Self::default());
        gates.push((key, Arc::downgrade(&gate)));
        gate
    }

    fn wait_for_captures(&self) {
        let mut state = self.state.lock();
        while state.capturing > 0 {
            self.changed.wait(&mut state);
        }
    }

    fn announce(self: &Arc<Self>) -> Waiting {
        self.state.lock().waiting += 1;
        Waiting(Arc::clone(self))
    }
}

/// A guard: a runtime waits for captures until the guard is dropped.
struct Waiting(Arc<DeviceGate>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.state.lock().waiting -= 1;
        self.0.changed.notify_all();
    }
}

/// A runtime's use of a device's gate.
#[derive(Debug)]
pub(crate) struct CaptureGate {
    gate: Arc<DeviceGate>,
    /// Streams of this runtime among those that take part in a capture.
    own: AtomicU32,
}

/// A guard: a stream takes part in a capture until the guard is dropped or forgotten.
pub(crate) struct Capturing<'g>(&'g CaptureGate);

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        self.0.capture_ended();
    }
}

impl CaptureGate {
    /// Returns the gate of a backend's device.
    pub(crate) fn of(backend: BackendTag, info: &DeviceInfo) -> Self {
        Self { gate: DeviceGate::of(backend, info), own: AtomicU32::new(0) }
    }

    /// Keeps captures from beginning. Returns `None` if one is open.
    pub(crate) fn quiet(&self) -> Option<Quiet> {
        let mut state = self.gate.state.lock();
        if state.capturing > 0 {
            return None;
        }
        state.quiet += 1;
        Some(Quiet(Arc::clone(&self.gate)))
    }

    /// Waits until no capture is open behind any of the gates, then keeps captures from beginning behind all. New
    /// captures make way meanwhile. A thread inside a capture must not call this.
    pub(crate) fn wait_until_quiet<'g>(gates: impl Iterator<Item = &'g Self> + Clone) -> Vec<Quiet> {
        let _waiting: Vec<Waiting> = gates.clone().map(|gate| gate.gate.announce()).collect();
        loop {
            let mut quiet = Vec::new();
            let closed = gates.clone().find(|gate| match gate.quiet() {
                Some(one) => {
                    quiet.push(one);
                    false
                }
                None => true,
            });
            let Some(closed) = closed else { return quiet };
            drop(quiet);
            closed.gate.wait_for_captures();
        }
    }

    /// Makes way, before a capture begins, for runtimes that wait for captures to end.
    pub(crate) fn make_way(&self) {
        let mut state = self.gate.state.lock();
        let until = Instant::now() + MAKE_WAY;
        while state.waiting > 0 && !self.gate.changed.wait_until(&mut state, until).timed_out() {}
    }

    /// Counts a stream that is about to take part in a capture, then waits for calls during which none may begin.
    pub(crate) fn capturing(&self) -> Capturing<'_> {
        let mut state = self.gate.state.lock();
        state.capturing += 1;
        // Relaxed: for statistics only.
        self.own.fetch_add(1, Ordering::Relaxed);
        let capturing = Capturing(self);
        while state.quiet > 0 {
            self.gate.changed.wait(&mut state);
        }
        capturing
    }

    /// Notes that a stream takes part no more.
    pub(crate) fn capture_ended(&self) {
        self.own.fetch_sub(1, Ordering::Relaxed);
        self.gate.state.lock().capturing -= 1;
        self.gate.changed.notify_all();
    }

    /// Streams of this runtime that take part in a capture.
    pub(crate) fn capturing_streams(&self) -> u64 {
        u64::from(self.own.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
impl CaptureGate {
    pub(crate) fn is_locked(&self) -> bool {
        self.gate.state.is_locked()
    }

    /// Holds the lock of the gate, for the fork test.
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.gate.state.lock())
    }
}

/// Holds the lock of the registry, for the fork test.
#[cfg(test)]
pub(crate) fn hold_registry() -> impl Drop {
    crate::testing::Held(registry().gates.lock())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(uuid: u8, place: Option<&str>) -> DeviceInfo {
        let mut info = DeviceInfo::new(0, "device", [uuid; 16], 1);
        info.pci_address = place.map(str::to_owned);
        info
    }

    #[test]
    fn one_physical_device_has_one_gate_and_each_simulated_one_its_own() {
        let (one, other) = (BackendTag::next(), BackendTag::next());
        let of = |tag, info: &DeviceInfo| CaptureGate::of(tag, info).gate;
        let physical = device(201, Some("0000:c1:00.0"));
        let gate = of(one, &physical);
        assert!(Arc::ptr_eq(&gate, &of(other, &physical)), "by another backend");
        assert!(!Arc::ptr_eq(&gate, &of(one, &device(202, Some("0000:c1:00.0")))), "a part of the same board");
        assert!(!Arc::ptr_eq(&gate, &of(one, &device(201, Some("0000:c2:00.0")))), "with a UUID that says nothing");
        let simulated = device(201, None);
        let gate = of(one, &simulated);
        assert!(Arc::ptr_eq(&gate, &of(one, &simulated)) && !Arc::ptr_eq(&gate, &of(other, &simulated)));
        let known = |tag| registry().gates.lock().iter().filter(|(key, _)| *key == Key::of(tag, &simulated)).count();
        assert_eq!(known(one), 1);
        drop(gate);
        of(other, &simulated);
        assert_eq!(known(one), 0, "a gate that nobody uses is forgotten");
    }

    #[test]
    fn captures_that_follow_each_other_do_not_keep_a_runtime_waiting() {
        const THREADS: usize = 8;
        let gate = CaptureGate::of(BackendTag::next(), &device(205, None));
        let stop = std::sync::atomic::AtomicBool::new(false);
        let begun = std::sync::Barrier::new(THREADS + 1);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let mut open = gate.capturing();
                    begun.wait();
                    // Some thread has a capture open at any time, unless captures make way.
                    while !stop.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(2));
                        drop(open);
                        gate.make_way();
                        open = gate.capturing();
                    }
                });
            }
            begun.wait();
            let before = Instant::now();
            drop(CaptureGate::wait_until_quiet(std::iter::once(&gate)));
            let waited = before.elapsed();
            stop.store(true, Ordering::Relaxed);
            assert!(waited < Duration::from_secs(5), "{waited:?}");
        });
    }

    #[test]
    fn a_capture_that_an_open_one_waits_for_begins_while_a_runtime_waits() {
        let gate = CaptureGate::of(BackendTag::next(), &device(206, None));
        let outer = gate.capturing();
        let _waiting = gate.gate.announce();
        gate.make_way();
        drop((gate.capturing(), outer));
    }

    #[test]
    fn who_waits_for_several_devices_keeps_no_capture_from_beginning() {
        let tag = BackendTag::next();
        let mut second = device(204, None);
        second.ordinal = 1;
        let gates = [CaptureGate::of(tag, &device(203, None)), CaptureGate::of(tag, &second)];
        let open = gates[1].capturing();
        let waiting = std::sync::atomic::AtomicBool::new(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let quiet = CaptureGate::wait_until_quiet(gates.iter());
                waiting.store(false, Ordering::Relaxed);
                drop(quiet);
            });
            // Streams of the first device may join the capture, any number of times.
            for _ in 0..1000 {
                drop(gates[0].capturing());
            }
            assert!(waiting.load(Ordering::Relaxed));
            drop(open);
        });
        assert!(!waiting.load(Ordering::Relaxed));
    }
}
