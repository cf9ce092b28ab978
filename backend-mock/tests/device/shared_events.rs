//! Events that several processes record, ask and wait for.
//!
//! A record stays ahead for as long as a test wants when it is made on a backend of endless latency: it is reached when
//! that backend ends, and never when its process is killed.

use std::os::fd::OwnedFd;
use std::time::Duration;

use highwater_hal::{Backend, Completion, Descriptor, ErrorKind, EventHandle, EventOptions, FillPattern};

use crate::peer::{self, Peer};
use crate::rig::{Rig, at, kind, small};

const FOR_EVER: Duration = Duration::from_secs(1 << 30);

#[test]
fn a_wait_is_for_the_record_of_its_time() {
    const TEST: &str = "shared_events::a_wait_is_for_the_record_of_its_time";
    if let Some(parent) = peer::parent() {
        // The other process never reaches its record, because it is killed before.
        let rig = Rig::new(small().with_latency(FOR_EVER));
        let event = rig.ipc().open_event(0, &parent.receive_event()).unwrap();
        rig.gpu.record_event(event, rig.stream).unwrap();
        parent.say("recorded");
        parent.receive();
        return;
    }
    let rig = Rig::new(small());
    let (event, other) = (rig.interprocess_event(), rig.stream(0));
    let mut recorder = Peer::start(TEST);
    recorder.channel.send_event(&rig.ipc().export_event(event).unwrap());
    recorder.channel.expect("recorded");
    rig.gpu.stream_wait_event(rig.stream, event).unwrap();
    // From here on the event is this process's record, which is reached at once.
    rig.gpu.record_event(event, other).unwrap();
    rig.gpu.synchronize_event(event).unwrap();
    assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Pending);
    recorder.kill();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
}

#[test]
fn an_event_of_the_same_process_is_opened_under_another_id() {
    let rig = Rig::new(small());
    let slow = Rig::new(small().with_latency(FOR_EVER));
    let event = rig.interprocess_event();
    let handle = rig.ipc().export_event(event).unwrap();
    assert_eq!(rig.gpu.live_objects().descriptors, 1);
    let opened = slow.ipc().open_event(0, &handle).unwrap();
    drop(handle);
    // The file lives on without the event that it was made for.
    slow.gpu.record_event(opened, slow.stream).unwrap();
    assert_eq!(rig.gpu.query_event(event).unwrap(), Completion::Pending);
    rig.gpu.stream_wait_event(rig.stream, event).unwrap();
    rig.gpu.destroy_event(event).unwrap();
    assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Pending);
    slow.gpu.destroy_event(opened).unwrap();
    assert_eq!(kind(slow.gpu.query_event(opened)), ErrorKind::InvalidHandle);
    drop(slow);
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    assert_eq!(rig.gpu.live_objects().shared_files, 0);
}

#[test]
fn a_lost_device_loses_those_who_wait_for_it() {
    let (rig, slow) = (Rig::new(small()), Rig::new(small().with_latency(FOR_EVER)));
    let event = rig.interprocess_event();
    let opened = slow.open_event_of(&rig, event);
    slow.gpu.record_event(opened, slow.stream).unwrap();
    slow.gpu.lose_device(0).unwrap();
    // A record that the stream refuses is none.
    assert_eq!(kind(slow.gpu.record_event(opened, slow.stream)), ErrorKind::DeviceLost);
    assert_eq!(rig.gpu.query_event(event).unwrap(), Completion::Pending);
    drop(slow);
    assert_eq!(kind(rig.gpu.synchronize_event(event)), ErrorKind::DeviceLost);
}

#[test]
fn what_cannot_be_exported_or_opened_is_refused() {
    let rig = Rig::new(small().with_devices(2));
    let (own, plain) = (rig.interprocess_event(), rig.event(0));
    assert_eq!(kind(rig.ipc().export_event(plain)), ErrorKind::InvalidArgument);
    let handle = rig.ipc().export_event(own).unwrap();
    let opened = rig.ipc().open_event(0, &handle).unwrap();
    assert_eq!(kind(rig.ipc().export_event(opened)), ErrorKind::InvalidArgument);
    rig.gpu.destroy_event(opened).unwrap();
    assert_eq!(kind(rig.ipc().export_event(opened)), ErrorKind::InvalidHandle);

    let other = rig.ipc().export_event(rig.interprocess_event()).unwrap();
    let with = |change: &dyn Fn(&mut EventHandle)| {
        let mut altered = handle.clone();
        change(&mut altered);
        altered
    };
    let descriptor =
        |file: OwnedFd| with(&|handle| handle.descriptor = Some(Descriptor::new(file.try_clone().unwrap())));
    let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, 16384).unwrap();
    let mut wrong: Vec<_> = (0..64).map(|index| with(&|handle| handle.payload[index] ^= 1)).collect();
    wrong.extend([
        with(&|handle| handle.descriptor = None),
        with(&|handle| handle.descriptor = other.descriptor.clone()),
        with(&|handle| handle.device_uuid = [0; 16]),
        descriptor(unsealed),
        descriptor(std::fs::File::open("/dev/zero").unwrap().into()),
    ]);
    // A memory handle is no event handle.
    let memory = rig.export(rig.shareable(4096));
    wrong.push(EventHandle::new(memory.device_uuid, memory.payload).with_descriptor(memory.descriptor.unwrap()));
    let events = rig.gpu.live_objects().events;
    for handle in &wrong {
        let error = rig.ipc().open_event(0, handle).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    assert_eq!(kind(rig.ipc().open_event(1, &handle)), ErrorKind::InvalidArgument);
    assert_eq!(rig.gpu.live_objects().events, events);
    let without = Rig::new(small().with_capabilities(|c| c.interprocess_events = false));
    assert_eq!(kind(without.ipc().open_event(0, &handle)), ErrorKind::Unsupported);
    let both = EventOptions::new().with_interprocess().with_timing();
    assert_eq!(kind(rig.gpu.create_event(0, &both)), ErrorKind::InvalidArgument);
}

#[test]
fn an_event_for_others_keeps_the_rules_of_all_events() {
    let rig = Rig::new(small().with_devices(2));
    let event = rig.interprocess_event();
    assert_eq!(rig.gpu.query_event(event).unwrap(), Completion::Complete);
    rig.gpu.synchronize_event(event).unwrap();
    rig.gpu.stream_wait_event(rig.stream, event).unwrap();
    assert_eq!(kind(rig.gpu.record_event(event, rig.stream(1))), ErrorKind::WrongDevice);
    assert_eq!(kind(rig.gpu.event_elapsed_ns(event, event)), ErrorKind::InvalidArgument);
    // Streams of two devices, and far more records than can be outstanding.
    let (block, far) = (rig.allocate(0, 64), rig.stream(1));
    for value in 0..3000u32 {
        rig.fill(block, FillPattern::U32(value), 16, rig.stream).unwrap();
        rig.gpu.record_event(event, rig.stream).unwrap();
        if value % 100 == 99 {
            rig.gpu.synchronize_event(event).unwrap();
        }
    }
    rig.gpu.stream_wait_event(far, event).unwrap();
    let copied = rig.allocate(1, 64);
    rig.copy(at(1, copied), at(0, block), 64, far).unwrap();
    assert_eq!(rig.download::<u32>(copied, 16, far), [2999; 16]);
}
