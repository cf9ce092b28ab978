//! The identity of the backend, and the descriptions of its devices.

use highwater_hal::{Backend, CaptureMode};

use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Block, Capture, DEVICE, Event, Handle, Stream};

cases! {
    group "identity";
    is_stable: ["identity.stable"];
    tags_every_id: ["identity.tagged"];
    has_a_device: ["devices.some"];
    device_info_is_stable: ["devices.uuid"];
    uuids_differ: ["devices.uuid"] needs [TWO_DEVICES];
    capabilities_are_stable: ["devices.capabilities-stable"];
    memory_info_agrees_with_the_device: ["memory.info"];
    unknown_devices_are_refused: ["backend.device-checked"];
    errors_name_the_call_and_the_fault: ["backend.errors"];
    host_allocator_is_one: ["host.one-allocator"];
    sharing_is_offered_where_there_is_a_transport: ["ipc.offered"];
}

fn is_stable(backend: &dyn Backend) -> CaseResult {
    let first = backend.identity().clone();
    let stream = Stream::new(backend)?;
    check_eq!(*backend.identity(), first, "the identity after a stream was made");
    drop(stream);
    check_eq!(*backend.identity(), first, "the identity after the stream was destroyed");
    check!(!first.name.is_empty(), "the backend has no name");
    check_eq!(backend.device_count(), backend.device_count(), "the number of devices, asked twice");
    Ok(())
}

fn tags_every_id(backend: &dyn Backend) -> CaseResult {
    let tag = backend.identity().tag;
    for device in 0..backend.device_count() {
        let (stream, event) = (Stream::on(backend, device)?, Event::on(backend, device)?);
        check_eq!((stream.id().tag(), stream.id().device()), (tag, device), "tag and device of a stream");
        check_eq!((event.id().tag(), event.id().device()), (tag, device), "tag and device of an event");
        let capabilities = backend.capabilities(device)?;
        if capabilities.capture {
            let graph = Capture::begin(&stream, CaptureMode::Relaxed)?.end(&[])?;
            let executable = graph.instantiate()?;
            check_eq!((graph.id().tag(), graph.id().device()), (tag, device), "tag and device of a graph");
            let id = executable.id();
            check_eq!((id.tag(), id.device()), (tag, device), "tag and device of an executable graph");
        }
        if capabilities.foreign_objects {
            // SAFETY: the owners outlive their wrappers, which are dropped at the end of the block.
            let (stream, event) = unsafe {
                let (raw_stream, raw_event) = (backend.raw_stream(stream.id())?, backend.raw_event(event.id())?);
                let stream = Stream::adopted(backend, backend.stream_from_raw(device, raw_stream)?);
                (stream, Event::adopted(backend, backend.event_from_raw(device, raw_event)?))
            };
            check_eq!((stream.id().tag(), stream.id().device()), (tag, device), "tag and device of a wrapped stream");
            check_eq!((event.id().tag(), event.id().device()), (tag, device), "tag and device of a wrapped event");
        }
    }
    Ok(())
}

fn has_a_device(backend: &dyn Backend) -> CaseResult {
    check!(backend.device_count() >= 1, "the backend opened without a device");
    for device in 0..backend.device_count() {
        let info = backend.device_info(device)?;
        check_eq!(info.ordinal, device, "the ordinal in the description of a device");
        check!(info.memory_bytes > 0, "device {device} has no memory");
    }
    Ok(())
}

fn device_info_is_stable(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let info = backend.device_info(device)?;
        check!(info.uuid != [0; 16], "device {device} has an empty UUID");
        check_eq!(backend.device_info(device)?, info, "the description of device {device}, asked twice");
    }
    Ok(())
}

fn uuids_differ(backend: &dyn Backend) -> CaseResult {
    let mut seen = Vec::new();
    for device in 0..backend.device_count() {
        let uuid = backend.device_info(device)?.uuid;
        let twin = seen.iter().position(|other| *other == uuid);
        check!(twin.is_none(), "devices {twin:?} and {device} share the UUID {uuid:x?}");
        seen.push(uuid);
    }
    Ok(())
}

fn capabilities_are_stable(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let first = backend.capabilities(device)?;
        let stream = Stream::on(backend, device)?;
        check_eq!(backend.capabilities(device)?, first, "the capabilities of device {device} after a stream was made");
        drop(stream);
        check!(
            first.workspace_alignment.is_power_of_two(),
            "workspace alignment {} of device {device} is no power of two",
            first.workspace_alignment
        );
    }
    Ok(())
}

fn memory_info_agrees_with_the_device(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let total = backend.device_info(device)?.memory_bytes;
        let agrees = |when: &str| -> CaseResult {
            let memory = backend.memory_info(device)?;
            check!(
                memory.free <= memory.total,
                "device {device}, {when}: {} bytes free of {}",
                memory.free,
                memory.total
            );
            check_eq!(memory.total, total, "total memory of device {device}, {when}");
            Ok(())
        };
        agrees("at first")?;
        let block = Block::on(backend, device, 1 << 20)?;
        agrees("with a block")?;
        drop(block);
        agrees("after it was freed")?;
    }
    Ok(())
}

fn unknown_devices_are_refused(backend: &dyn Backend) -> CaseResult {
    use highwater_hal::{AllocateOptions, BlasKind, BlasOptions, EventOptions, StreamOptions};
    let before = backend.live_objects();
    for device in [backend.device_count(), backend.device_count() + 1, u32::MAX] {
        check_error!(backend.device_info(device), InvalidArgument, "device_info({device})");
        check_error!(backend.capabilities(device), InvalidArgument, "capabilities({device})");
        check_error!(backend.memory_info(device), InvalidArgument, "memory_info({device})");
        check_error!(backend.create_stream(device, &StreamOptions::new()), InvalidArgument, "create_stream({device})");
        check_error!(backend.synchronize_device(device), InvalidArgument, "synchronize_device({device})");
        check_error!(backend.create_event(device, &EventOptions::new()), InvalidArgument, "create_event({device})");
        check_error!(backend.allocate(device, &AllocateOptions::new(256)), InvalidArgument, "allocate({device})");
        let blas = backend.create_blas_handle(device, &BlasOptions::new(BlasKind::Blas));
        check_error!(blas, InvalidArgument, "create_blas_handle({device})");
        let pinned = crate::device::Pinned::new(backend, 64)?;
        let address = backend.host_allocator().device_address(pinned.ptr(), device);
        check_error!(address, InvalidArgument, "device_address({device})");
    }
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    Ok(())
}

/// The validation layer judges the form of every error of every case. Here, each trait returns some.
fn errors_name_the_call_and_the_fault(backend: &dyn Backend) -> CaseResult {
    use highwater_hal::{AllocateOptions, BlasKind, EventOptions, HostOptions, StreamOptions};
    let none = backend.device_count();
    let most = usize::MAX / 4;
    let (stream, stale) = (Stream::new(backend)?, Event::new(backend)?.destroy()?);
    let allocator = backend.host_allocator();
    let mut handle = Handle::unbound(backend, BlasKind::Blas, DEVICE)?;
    handle.raw_mut().destroy()?;
    let handle = std::cell::RefCell::new(handle);
    type Refused<'a> = (&'static str, Box<dyn Fn() -> highwater_hal::Result<()> + 'a>);
    let calls: [Refused<'_>; 11] = [
        ("device_info", Box::new(|| backend.device_info(none).map(drop))),
        ("create_stream", Box::new(|| backend.create_stream(none, &StreamOptions::new()).map(drop))),
        ("create_event", Box::new(|| backend.create_event(none, &EventOptions::new()).map(drop))),
        ("allocate", Box::new(|| backend.allocate(DEVICE, &AllocateOptions::new(0)).map(drop))),
        ("allocate", Box::new(|| backend.allocate(DEVICE, &AllocateOptions::new(most)).map(drop))),
        ("query_event", Box::new(|| backend.query_event(stale).map(drop))),
        ("stream_wait_event", Box::new(|| backend.stream_wait_event(stream.id(), stale))),
        ("host_allocate", Box::new(|| allocator.allocate(0, &HostOptions::new()).map(drop))),
        ("host_allocate", Box::new(|| allocator.allocate(most, &HostOptions::new()).map(drop))),
        ("set_stream", Box::new(|| handle.borrow_mut().raw_mut().set_stream(stream.id()))),
        ("destroy", Box::new(|| handle.borrow_mut().raw_mut().destroy())),
    ];
    for (operation, call) in calls {
        let Err(error) = call() else { return Err(Failure::new(format!("a bad call of {operation} succeeded"))) };
        check_eq!(error.operation(), operation, "the operation of the error `{error}`");
        check!(!error.message().trim().is_empty(), "an error of {operation} has no message");
    }
    Ok(())
}

/// The validation layer compares the objects of all calls.
fn host_allocator_is_one(backend: &dyn Backend) -> CaseResult {
    let (first, second) = (backend.host_allocator(), backend.host_allocator());
    let ptr = first.allocate(64, &highwater_hal::HostOptions::new())?;
    // SAFETY: allocated just now, by an allocator that must be the same one, and unused.
    unsafe { second.free(ptr)? };
    Ok(())
}

fn sharing_is_offered_where_there_is_a_transport(backend: &dyn Backend) -> CaseResult {
    let mut any = false;
    for device in DEVICE..backend.device_count() {
        any |= !backend.capabilities(device)?.ipc_transports.is_empty();
    }
    // The validation layer compares the objects of all calls.
    for _ in 0..2 {
        check_eq!(backend.ipc_sharing().is_some(), any, "whether sharing is offered");
    }
    Ok(())
}
