//! Tests over whole libraries: a fork after the driver was initialized, handles whose stream is destroyed, products
//! without elements, and foreign users of the same context.
//!
//! Each test runs again under `scripts/simulated.sh`, which puts simulated libraries in the place of NVIDIA's. With
//! `HIGHWATER_TEST_INSIDE=0`, the tests run over the libraries that the loader finds, including real ones.

use std::io::{BufRead, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;

use highwater_core::{
    AllocateOptions, Backend, BlasKind, BlasOptions, CaptureMode, DataType, DeviceBuffer, DeviceMemoryOptions,
    DeviceSlice, Epilogue, ErrorKind, EventOptions, FillPattern, Gemm, GemmShape, HostOptions, Location, MemoryCopy,
    MemoryFill, PhysicalMemoryOptions, PlanArguments, PlanOptions, Result, Runtime, RuntimeOptions, Stream, StreamId,
    StreamOptions, Ticket, TicketBatch, Transport,
};
use highwater_simulated_harness::isolated;

/// Returns the backend in the run over the simulation. Returns `None` after that run.
fn open(test: &str) -> Option<Arc<dyn Backend>> {
    if isolated::version().is_some() {
        return Some(highwater_cuda::open().unwrap());
    }
    // More devices than any test needs.
    isolated::outside(test, &["cuda"], &[("HIGHWATER_MOCK", "devices=2")], None);
    None
}

#[test]
fn a_child_that_opens_the_backend_again_is_told_of_the_fork() {
    let Some(backend) = open("a_child_that_opens_the_backend_again_is_told_of_the_fork") else { return };
    // SAFETY: The child calls the backend, which takes no lock in a child, and ends with `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let opened = highwater_cuda::open().err().map(|unavailable| unavailable.error.kind());
        let used = backend.create_stream(0, &StreamOptions::new()).err().map(|error| error.kind());
        let told = opened == Some(ErrorKind::Forked) && used == Some(ErrorKind::Forked);
        // SAFETY: Ends the child without running anything else.
        unsafe { libc::_exit(if told { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: Waits for the child made above.
    unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(status, 0);
    // The parent continues, and opens the backend again.
    assert!(highwater_cuda::open().is_ok());
}

/// The driver ends the process if a stream waits directly for an interprocess event of another device.
#[test]
fn streams_wait_for_foreign_interprocess_events_of_another_device() {
    let Some(backend) = open("streams_wait_for_foreign_interprocess_events_of_another_device") else { return };
    if backend.device_count() < 2 {
        return;
    }
    const BYTES: usize = 4 << 20;
    let [near, far] = [0, 1].map(|device| backend.create_stream(device, &StreamOptions::new()).unwrap());
    let event = backend.create_event(0, &EventOptions::new().with_interprocess()).unwrap();
    // SAFETY: the event outlives the id.
    let foreign = unsafe { backend.event_from_raw(0, backend.raw_event(event).unwrap()) }.unwrap();
    let block = backend.allocate(0, &AllocateOptions::new(BYTES)).unwrap();
    let before = backend.live_objects();
    for _ in 0..20 {
        // SAFETY: the block is used by this stream only, and outlives the fill.
        unsafe { backend.fill(&MemoryFill::new(0, block, FillPattern::U8(1), BYTES), near) }.unwrap();
    }
    backend.record_event(foreign, near).unwrap();
    backend.stream_wait_event(far, foreign).unwrap();
    backend.synchronize_stream(far).unwrap();
    assert!(backend.query_event(event).unwrap().is_complete(), "the stream did not wait for the record");
    assert_eq!(backend.live_objects(), before);
    backend.synchronize_stream(near).unwrap();
    backend.destroy_event(foreign).unwrap();
    backend.destroy_event(event).unwrap();
    // SAFETY: no work uses the block any more.
    unsafe { backend.free(0, block, None) }.unwrap();
    [near, far].into_iter().for_each(|stream| backend.destroy_stream(stream).unwrap());
}

#[test]
fn handles_whose_stream_was_destroyed_take_another_or_are_destroyed() {
    let Some(backend) = open("handles_whose_stream_was_destroyed_take_another_or_are_destroyed") else { return };
    for kind in [BlasKind::Blas, BlasKind::Lt] {
        for again in [true, false] {
            let mut handle = backend.create_blas_handle(0, &BlasOptions::new(kind)).unwrap();
            let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
            handle.set_stream(stream).unwrap();
            backend.destroy_stream(stream).unwrap();
            assert_eq!(handle.set_stream(stream).unwrap_err().kind(), ErrorKind::InvalidHandle);
            if again {
                let other = backend.create_stream(0, &StreamOptions::new()).unwrap();
                handle.set_stream(other).unwrap();
                backend.destroy_stream(other).unwrap();
            }
            handle.destroy().unwrap();
        }
    }
    assert_eq!(backend.live_objects().total(), 0);
}

#[test]
fn a_plan_of_no_elements_is_made_and_writes_nothing() {
    let Some(backend) = open("a_plan_of_no_elements_is_made_and_writes_nothing") else { return };
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Lt)).unwrap();
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    handle.set_stream(stream).unwrap();
    for (m, n) in [(0, 4), (4, 0), (0, 0)] {
        let shape = GemmShape::new(DataType::F32, m, n, 3);
        let plan = handle.create_plan(&PlanOptions::new(shape, Epilogue::Bias, 0)).unwrap();
        let nowhere = highwater_core::DevicePtr::new(0x1000);
        // SAFETY: There is no element, so no address is followed.
        unsafe { handle.run_plan(plan, &PlanArguments::new(nowhere, nowhere, nowhere, Some(nowhere))) }.unwrap();
        handle.destroy_plan(plan).unwrap();
    }
    handle.destroy().unwrap();
    backend.destroy_stream(stream).unwrap();
    assert_eq!(backend.live_objects().total(), 0);
}

/// Returns the context that is current in this thread.
fn current() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: The call writes one pointer that lives until it returns.
    assert_eq!(unsafe { cudarc::driver::sys::cuCtxGetCurrent(&mut context) } as u32, 0);
    context.addr()
}

/// Makes calls of every kind that need a context.
fn make_calls(backend: &dyn Backend) {
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    let block = backend.allocate(0, &AllocateOptions::new(4096)).unwrap();
    let host = backend.host_allocator().allocate(4096, &HostOptions::new()).unwrap();
    let legacy = StreamId::legacy_default(backend.identity().tag, 0);
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    for stream in [stream, legacy] {
        let fill = MemoryFill::new(0, block, FillPattern::U32(0x3f80_0000), 1024);
        let copy = MemoryCopy::new(Location::Host(host), Location::Device { device: 0, ptr: block.offset(2048) }, 2048);
        // SAFETY: The ranges lie inside the blocks, which live until the stream was waited for; the matrices are 16 x 16.
        unsafe {
            backend.fill(&fill, stream).unwrap();
            handle.set_stream(stream).unwrap();
            let shape = GemmShape::new(DataType::F32, 16, 16, 16);
            handle.gemm(&Gemm::new(shape, block, block, block.offset(2048))).unwrap();
            backend.copy(&copy, stream).unwrap();
        }
        backend.record_event(event, stream).unwrap();
        backend.synchronize_event(event).unwrap();
        // SAFETY: The copy is done; the memory holds 512 numbers.
        let values = unsafe { std::slice::from_raw_parts(host.as_ptr().cast::<f32>(), 512) };
        assert!(values[..256].iter().all(|value| *value == 16.0) && values[256..].iter().all(|value| *value == 1.0));
    }
    handle.destroy().unwrap();
    make_calls_of_mapped_memory(backend, stream);
    // SAFETY: Nothing uses them any more.
    unsafe {
        backend.host_allocator().free(host).unwrap();
        backend.free(0, block, None).unwrap();
    }
    backend.destroy_event(event).unwrap();
    backend.destroy_stream(stream).unwrap();
}

fn make_calls_of_mapped_memory(backend: &dyn Backend, stream: StreamId) {
    let piece = backend.capabilities(0).unwrap().mapped_memory_granularity;
    let ptr = backend.reserve_addresses(0, 2 * piece).unwrap();
    let memory = backend.create_memory(0, &PhysicalMemoryOptions::new(2 * piece)).unwrap();
    let fill = MemoryFill::new(0, ptr, FillPattern::U8(1), 2 * piece);
    // SAFETY: The addresses belong to this function, and the stream is waited for before they are unmapped.
    unsafe {
        backend.map_memory(0, ptr, memory).unwrap();
        backend.set_memory_access(0, ptr, 2 * piece, 0).unwrap();
        backend.fill(&fill, stream).unwrap();
        backend.synchronize_stream(stream).unwrap();
        backend.unmap_memory(0, ptr, 2 * piece).unwrap();
        backend.destroy_memory(memory).unwrap();
        backend.free_addresses(0, ptr, 2 * piece).unwrap();
    }
}

#[test]
fn a_device_without_virtual_memory_has_no_mapped_memory() {
    const TEST: &str = "a_device_without_virtual_memory_has_no_mapped_memory";
    if isolated::version().is_none() {
        return isolated::outside(TEST, &["cuda"], &[("HIGHWATER_MOCK", "mapped-memory=off")], None);
    }
    let backend = highwater_cuda::open().unwrap();
    let capabilities = backend.capabilities(0).unwrap();
    assert!(!capabilities.mapped_memory && !capabilities.mapped_memory_rdma);
    assert_eq!(capabilities.mapped_memory_granularity, 0);
    assert_eq!(backend.reserve_addresses(0, 2 << 20).unwrap_err().kind(), ErrorKind::Unsupported);
    let created = backend.create_memory(0, &PhysicalMemoryOptions::new(2 << 20));
    assert_eq!(created.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(backend.live_objects().total(), 0);
}

#[test]
fn the_context_of_the_caller_is_current_again_after_each_call() {
    let Some(backend) = open("the_context_of_the_caller_is_current_again_after_each_call") else { return };
    // None.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(current(), 0);
            make_calls(&*backend);
            assert_eq!(current(), 0);
        });
    });
    // The primary context, which cudarc makes current.
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    let before = current();
    assert_ne!(before, 0);
    make_calls(&*backend);
    assert_eq!(current(), before);
    assert_eq!(backend.live_objects().total(), 0);
}

#[test]
fn streams_and_memory_of_cudarc_and_of_the_backend_work_together() {
    let Some(backend) = open("streams_and_memory_of_cudarc_and_of_the_backend_work_together") else { return };
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let theirs = context.new_stream().unwrap();
    // SAFETY: The stream lives to the end of this test.
    let wrapped = unsafe { backend.stream_from_raw(0, theirs.cu_stream().addr() as u64) }.unwrap();
    let block = backend.allocate(0, &AllocateOptions::new(4096)).unwrap();
    // Both enqueue on cudarc's stream, in order: cudarc's bytes go to the backend's memory after the fill, and return.
    let slice = theirs.clone_htod(&[7_u8; 1024]).unwrap();
    let fill = MemoryFill::new(0, block, FillPattern::U8(1), 4096);
    let (source, _uses) = cudarc::driver::DevicePtr::device_ptr(&slice, &theirs);
    let here = |offset: usize| Location::Device { device: 0, ptr: block.offset(offset) };
    let from = Location::Device { device: 0, ptr: highwater_core::DevicePtr::new(source) };
    let host = backend.host_allocator().allocate(4096, &HostOptions::new()).unwrap();
    // SAFETY: The ranges lie inside the blocks, which live until the stream was waited for.
    unsafe {
        backend.fill(&fill, wrapped).unwrap();
        backend.copy(&MemoryCopy::new(here(1024), from, 1024), wrapped).unwrap();
        backend.copy(&MemoryCopy::new(Location::Host(host), here(0), 4096), wrapped).unwrap();
    }
    theirs.synchronize().unwrap();
    // SAFETY: The copy is done.
    let bytes = unsafe { std::slice::from_raw_parts(host.as_ptr(), 4096) };
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if (1024..2048).contains(&at) { 7 } else { 1 }));
    // Wrapped objects are forgotten, not destroyed. When cudarc releases the context, the backend's context survives.
    backend.destroy_stream(wrapped).unwrap();
    assert_eq!(backend.query_stream(wrapped).unwrap_err().kind(), ErrorKind::InvalidHandle);
    theirs.synchronize().unwrap();
    drop(_uses);
    drop((slice, theirs, context));
    // SAFETY: Nothing uses them any more.
    unsafe {
        backend.free(0, block, None).unwrap();
        backend.host_allocator().free(host).unwrap();
    }
    make_calls(&*backend);
    assert_eq!(backend.live_objects().total(), 0);
}

#[test]
fn memory_is_shared_between_runtimes_of_two_processes_by_each_transport() {
    const TEST: &str = "memory_is_shared_between_runtimes_of_two_processes_by_each_transport";
    const TICKET: &str = "HIGHWATER_TEST_TICKET";
    let Some(backend) = open(TEST) else { return };
    let runtime = Runtime::new(backend).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    if let Ok(ticket) = std::env::var(TICKET) {
        // The second process checks what the first one wrote, and writes.
        let ticket: Ticket = ticket.parse().unwrap();
        for _ in 0..2 {
            let opened = runtime.open_shared::<f32>(&ticket).unwrap();
            assert_eq!(stream.download(&opened).unwrap()[999], 1.5);
        }
        let opened = runtime.open_shared::<f32>(&ticket).unwrap();
        stream.fill(opened.slice(0..500).unwrap(), 2.5_f32).unwrap();
        stream.synchronize().unwrap();
        drop((opened, stream, device));
        assert_eq!(runtime.close().unwrap().total(), 0);
        return;
    }
    let mut transports = Vec::new();
    for transport in [Transport::Legacy, Transport::Descriptor] {
        if !device.capabilities().ipc_transports.contains(transport) {
            continue;
        }
        let buffer = device.allocate_shared_by::<f32>(1000, transport).unwrap();
        stream.fill(&buffer, 1.5_f32).unwrap();
        let ticket = buffer.share().unwrap();
        assert_eq!(ticket.transport(), transport);
        let mut other = Command::new(std::env::current_exe().unwrap());
        other.args(["--exact", TEST, "--test-threads=1"]).env(TICKET, ticket.to_string());
        let output = other.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
        let values = stream.download(&buffer).unwrap();
        assert!(values[..500].iter().all(|value| *value == 2.5) && values[500..].iter().all(|value| *value == 1.5));
        transports.push(transport);
    }
    assert!(transports.contains(&Transport::Legacy), "{transports:?}");
    drop((stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// Returns the calls of the driver so far. `None` over a real driver.
fn driver_calls() -> Option<u64> {
    // SAFETY: The driver is loaded, and the call only finds it again. The symbol of the simulated driver has this type.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        assert!(!library.is_null(), "the driver is not loaded");
        let symbol = libc::dlsym(library, c"highwater_simulated_calls".as_ptr());
        if symbol.is_null() {
            let is_simulated = !libc::dlsym(library, c"highwater_simulated_blas".as_ptr()).is_null();
            assert!(!is_simulated, "the simulated driver does not count its calls");
            return None;
        }
        let calls: extern "C" fn() -> u64 = std::mem::transmute(symbol);
        Some(calls())
    }
}

/// A batch has slices of both transports. The other process opens each allocation once, by its first slice, and every other open
/// calls no function of the driver.
#[test]
fn an_open_of_another_slice_of_an_open_allocation_makes_no_call_of_the_driver() {
    const TEST: &str = "an_open_of_another_slice_of_an_open_allocation_makes_no_call_of_the_driver";
    const BATCHES: &str = "HIGHWATER_TEST_BATCHES";
    const SLICES: usize = 50;
    let Some(backend) = open(TEST) else { return };
    let runtime = Runtime::new(backend).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    if let Ok(batches) = std::env::var(BATCHES) {
        // Fresh allocations each: one slice of each allocation, and many slices of each.
        let [few, many] = [0, 1].map(|at| batches.split(',').nth(at).unwrap().parse::<TicketBatch>().unwrap());
        let open_first = |batch: &TicketBatch| {
            let before = driver_calls();
            let opened = runtime.open_shared_all::<f32>(batch).unwrap();
            assert_eq!(opened.len(), batch.len());
            (opened, driver_calls().zip(before).map(|(after, before)| after - before))
        };
        // The first open of the process brings the sharing up.
        let (opened, calls_of_few) = open_first(&few);
        drop(opened);
        let (opened, calls_of_many) = open_first(&many);
        assert_eq!(runtime.statistics().sharing.mappings, 2 * few.allocations() as u64);
        assert!(calls_of_few.is_none_or(|calls| calls > 0), "first opens are not counted");
        assert_eq!(calls_of_few, calls_of_many, "calls for each slice, and not for each allocation");
        let before = driver_calls();
        for _ in 0..2 {
            let again = runtime.open_shared_all::<f32>(&many).unwrap();
            assert_eq!((again.len(), again[7].ptr()), (many.len(), opened[7].ptr()));
            let tickets = (0..many.len()).map(|slice| many.ticket(slice).unwrap());
            let single: Vec<_> = tickets.map(|ticket| runtime.open_shared::<f32>(&ticket).unwrap()).collect();
            assert_eq!(single[7].ptr(), opened[7].ptr());
        }
        assert_eq!(driver_calls(), before, "an open or a drop of mapped memory calls the driver");
        for (slice, opened) in opened.iter().enumerate() {
            assert_eq!(stream.download(opened).unwrap(), vec![(slice / SLICES) as f32; 10]);
        }
        drop((opened, stream, device));
        assert_eq!(runtime.close().unwrap().total(), 0);
        return;
    }
    let transports = [Transport::Legacy, Transport::Descriptor, Transport::Descriptor, Transport::Legacy];
    let supported = device.capabilities().ipc_transports;
    let allocate = |(value, transport): (usize, Transport)| {
        let buffer = device.allocate_shared_by::<f32>(1000, transport).unwrap();
        stream.fill(&buffer, value as f32).unwrap();
        buffer
    };
    let transports = transports.into_iter().filter(|transport| supported.contains(*transport));
    let transports: Vec<_> = transports.enumerate().collect();
    let make = || transports.iter().copied().map(allocate).collect::<Vec<_>>();
    let (first, second) = (make(), make());
    let few: Vec<_> = first.iter().map(DeviceSlice::from).collect();
    let slices = |buffer| (0..SLICES).map(move |at| DeviceBuffer::slice(buffer, at * 20..at * 20 + 10).unwrap());
    let many: Vec<_> = second.iter().flat_map(slices).collect();
    // Nothing is left to be waited for.
    stream.synchronize().unwrap();
    let batches = [few, many].map(|slices| runtime.share_all(&slices).unwrap().to_string()).join(",");
    let mut other = Command::new(std::env::current_exe().unwrap());
    let output = other.args(["--exact", TEST, "--test-threads=1"]).env(BATCHES, batches).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    drop((first, second, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn copies_by_address_cross_the_borders_of_registrations() {
    const TEST: &str = "copies_by_address_cross_the_borders_of_registrations";
    const MIB: usize = 1 << 20;
    if isolated::version().is_none() {
        isolated::outside(TEST, &["cuda"], &[("HIGHWATER_MOCK", "latency=2ms")], None);
        return;
    }
    let runtime = Runtime::new(highwater_cuda::open().unwrap()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let piece = device.capabilities().register_piece_bytes;
    let mut pinned = runtime.pinned::<u32>((piece + 2 * MIB) / 4).unwrap();
    let borders: Vec<_> = pinned.registrations().skip(1).map(|part| part.start / 4).collect();
    assert!(!borders.is_empty());
    // 1000 values on both sides of each border.
    for border in borders {
        let first = pinned.ptr().offset(4 * (border - 1000));
        pinned.write().unwrap()[border - 1000..border + 1000].iter_mut().zip(0..).for_each(|(value, at)| *value = at);
        let on_device = device.allocate::<u32>(2000).unwrap();
        // SAFETY: The values are in the buffer, and `write` waits for the copy.
        unsafe { stream.copy_from_raw(first, &on_device).unwrap() };
        pinned.write().unwrap()[border - 1000..border + 1000].fill(u32::MAX);
        // SAFETY: As above, and `read` waits.
        unsafe { stream.copy_to_raw(&on_device, first).unwrap() };
        assert!(pinned.read().unwrap()[border - 1000..border + 1000].iter().zip(0..).all(|(value, at)| *value == at));
    }
    let last = pinned.ptr().offset(4 * (pinned.len() - 1));
    let two = device.allocate::<u32>(1 << 20).unwrap();
    // SAFETY: The call is refused.
    let refused = unsafe { stream.copy_from_raw(last, &two) }.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidPointer, "{refused}");
    drop((pinned, two, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// Returns whether the primary context of a device exists.
fn is_active(device: i32) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: The call writes two numbers, which outlive it.
    let code = unsafe { cudarc::driver::sys::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) };
    assert_eq!(code as u32, 0);
    active != 0
}

#[test]
fn the_search_for_the_device_of_an_object_makes_no_context() {
    const TEST: &str = "the_search_for_the_device_of_an_object_makes_no_context";
    if isolated::version().is_none() {
        isolated::outside(TEST, &["cuda"], &[("HIGHWATER_MOCK", "devices=4")], None);
        return;
    }
    let runtime = Runtime::new(highwater_cuda::open().unwrap()).unwrap();
    if runtime.device_count() < 4 {
        return;
    }
    let theirs = cudarc::driver::CudaContext::new(3).unwrap().new_stream().unwrap();
    let slice = theirs.alloc_zeros::<u8>(64).unwrap();
    let (address, _uses) = cudarc::driver::DevicePtr::device_ptr(&slice, &theirs);
    assert!((0..3).all(|device| !is_active(device)) && is_active(3));
    // The search passes the devices 0 and 2, and finds 3.
    let device = runtime.device(1).unwrap();
    let places = |text: &str| text.contains("belongs to device 3 (UUID ") && text.contains("not to device 1 (UUID ");
    // SAFETY: The stream and the memory live until the end of the test.
    let (stream, memory) = unsafe {
        let pointer = highwater_core::DevicePtr::new(address);
        (
            device.stream_from_raw(theirs.cu_stream().addr() as u64).unwrap_err(),
            DeviceBuffer::<u8>::from_raw(&device, pointer, 64).map(|_| ()).unwrap_err(),
        )
    };
    for error in [stream, memory] {
        assert_eq!(error.kind(), ErrorKind::WrongDevice, "{error}");
        assert!(places(error.message()), "{error}");
    }
    assert!((0..3).all(|device| !is_active(device)), "the search made a context");
}

#[test]
fn page_locked_memory_makes_no_context_on_a_device_that_is_not_used() {
    let Some(backend) = open("page_locked_memory_makes_no_context_on_a_device_that_is_not_used") else { return };
    if backend.device_count() < 2 {
        return;
    }
    let block = backend.allocate(1, &AllocateOptions::new(64)).unwrap();
    let host = backend.host_allocator().allocate(64, &HostOptions::new()).unwrap();
    assert!(is_active(1) && !is_active(0));
    // SAFETY: Nothing uses them.
    unsafe {
        backend.host_allocator().free(host).unwrap();
        backend.free(1, block, None).unwrap();
    }
    assert!(!is_active(0));
}

#[test]
fn a_product_that_loses_the_device_is_told_as_that() {
    let Some(backend) = open("a_product_that_loses_the_device_is_told_as_that") else { return };
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    handle.set_stream(stream).unwrap();
    // Reserved addresses without memory.
    let mut nowhere = 0;
    // SAFETY: The call writes one number, which outlives it.
    let code = unsafe { cudarc::driver::sys::cuMemAddressReserve(&mut nowhere, 4 << 20, 0, 0, 0) };
    assert_eq!(code as u32, 0);
    let at = |offset: u64| highwater_core::DevicePtr::new(nowhere + offset);
    let gemm = Gemm::new(GemmShape::new(DataType::F32, 64, 64, 64), at(0), at(1 << 20), at(2 << 20));
    // SAFETY: Breaks the contract on purpose: the device faults, and nothing uses it afterwards.
    let enqueued = unsafe { handle.gemm(&gemm) };
    let error = enqueued.and_then(|()| backend.synchronize_stream(stream)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    assert_eq!(error.code(), Some(700), "{error}");
    assert_eq!(backend.allocate(0, &AllocateOptions::new(64)).unwrap_err().kind(), ErrorKind::DeviceLost);
    // Objects that remain are left until the process ends. Dropping them is harmless.
}

/// Returns a function of cuBLAS, without the backend.
///
/// # Safety
/// The caller must name a function of that type.
unsafe fn cublas<F: Copy>(symbol: &str) -> F {
    let file = highwater_driver::loaded_files("libcublas.so").pop().unwrap();
    // SAFETY: The library is in this process already; the caller promises the type.
    unsafe {
        let library = std::mem::ManuallyDrop::new(libloading::Library::new(file).unwrap());
        *library.get::<F>(symbol.as_bytes()).unwrap()
    }
}

#[test]
fn settings_of_foreign_code_do_not_stay_on_a_handle() {
    let Some(backend) = open("settings_of_foreign_code_do_not_stay_on_a_handle") else { return };
    type Set = unsafe extern "C" fn(u64, u32) -> i32;
    type Get = unsafe extern "C" fn(u64, *mut u32) -> i32;
    let runtime = Runtime::new(backend).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let a = stream.upload(&[1.0_f32; 256]).unwrap();
    let c = stream.upload(&[0.0_f32; 256]).unwrap();
    let shape = GemmShape::of::<f32>(16, 16, 16);
    // The setter, the getter, a foreign value, and the value of a new handle of the backend.
    let settings = [
        ("cublasSetPointerMode_v2", "cublasGetPointerMode_v2", 1, 0),
        ("cublasSetMathMode", "cublasGetMathMode", 2, 16),
        ("cublasSetAtomicsMode", "cublasGetAtomicsMode", 1, 0),
        ("cublasSetSmCountTarget", "cublasGetSmCountTarget", 8, 0),
        ("cublasSetEmulationStrategy", "cublasGetEmulationStrategy", 2, 0),
    ];
    for (set, get, foreign, fresh) in settings {
        // SAFETY: The vendor's functions, with its arguments.
        let (set, get) = unsafe { (cublas::<Set>(set), cublas::<Get>(get)) };
        let mut lease = stream.blas().unwrap();
        // SAFETY: The handle is lent for the call.
        lease.with_raw(|raw| assert_eq!(unsafe { set(raw.handle, foreign) }, 0)).unwrap();
        lease.gemm(&shape, 1.0, &a, &a, 0.0, &c).unwrap();
        assert_eq!(stream.download(&c).unwrap(), [16.0; 256]);
        let mut found = u32::MAX;
        // SAFETY: As above; the number lives until the call returns.
        lease.with_raw(|raw| assert_eq!(unsafe { get(raw.handle, &mut found) }, 0)).unwrap();
        assert_eq!(found, fresh);
    }
    assert_eq!(runtime.statistics().blas_handles.created, 1);
}

#[test]
fn backends_opened_twice_do_not_lose_each_others_captures() {
    let Some(backend) = open("backends_opened_twice_do_not_lose_each_others_captures") else { return };
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let again = highwater_cuda::open().unwrap();
        let (runtime, other) = (Runtime::new(backend.clone()).unwrap(), Runtime::new(again.clone()).unwrap());
        let (device, theirs) = (runtime.device(0).unwrap(), other.device(0).unwrap());
        let stream = device.create_stream().unwrap();
        let block = stream.upload(&[1_u8; 64]).unwrap();
        // A handle that no thread has claimed. The calls below destroy it.
        let work = || {
            let stream = theirs.create_stream().unwrap();
            let (a, b) = (stream.upload(&[2.0_f32]).unwrap(), stream.upload(&[3.0_f32]).unwrap());
            let c = theirs.allocate::<f32>(1).unwrap();
            stream.blas().unwrap().gemm(&GemmShape::of::<f32>(1, 1, 1), 1.0, &a, &b, 0.0, &c).unwrap();
            assert_eq!(stream.download(&c).unwrap(), [6.0]);
        };
        std::thread::scope(|scope| scope.spawn(work).join().unwrap());
        let harm = move || {
            let stream = theirs.create_stream().unwrap();
            let event = stream.record().unwrap();
            for _ in 0..100 {
                stream.is_complete().unwrap();
                event.is_complete().unwrap();
            }
            other.trim().unwrap();
            assert_eq!(again.synchronize_device(0).unwrap_err().kind(), ErrorKind::Capture);
            assert_eq!(theirs.synchronize().unwrap_err().kind(), ErrorKind::Capture);
            let too_much = theirs.info().memory_bytes as usize;
            assert_eq!(theirs.allocate::<u8>(too_much).unwrap_err().kind(), ErrorKind::OutOfMemory);
            drop((stream, event, theirs));
            move || other.close().unwrap()
        };
        let mut end = None;
        let mut graph = stream
            .capture_with(mode, |stream| {
                let close = std::thread::scope(|scope| scope.spawn(harm).join().unwrap());
                end = Some(std::thread::spawn(close));
                stream.fill(&block, 7)
            })
            .unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        // The other backend leaves nothing behind. This test opened it separately.
        assert_eq!(end.unwrap().join().unwrap().total(), 0, "{mode:?}");
        graph.launch(&stream).unwrap();
        assert_eq!(stream.download(&block).unwrap(), [7; 64]);
        drop((graph, block, stream, device));
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
}

#[test]
fn cudarcs_default_streams_are_wrapped_by_their_handles() {
    let Some(backend) = open("cudarcs_default_streams_are_wrapped_by_their_handles") else { return };
    let runtime = Runtime::new(backend).unwrap();
    let device = runtime.device(0).unwrap();
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    // The stream of candle's default device.
    let theirs = context.per_thread_stream();
    let handle = theirs.cu_stream().addr() as u64;
    assert_eq!(handle, 2);
    // SAFETY: Default streams never end.
    let wrap = |handle| unsafe { device.stream_from_raw(handle) };
    for (handle, is_legacy) in [(handle, false), (1, true)] {
        let stream = wrap(handle).unwrap();
        assert_eq!((stream.id().is_legacy_default(), stream.id().is_per_thread_default()), (is_legacy, !is_legacy));
        let block = device.allocate::<u8>(1024).unwrap();
        stream.fill(&block, 7).unwrap();
        // The legacy stream and a per-thread stream wait for each other, so no other wait is needed.
        let mut bytes = vec![0_u8; 1024];
        // SAFETY: The range belongs to the block, and the copy is complete when the call returns.
        unsafe {
            cudarc::driver::result::memcpy_dtoh_async(&mut bytes, block.ptr().get(), theirs.cu_stream()).unwrap();
        }
        theirs.synchronize().unwrap();
        assert_eq!(bytes, [7; 1024]);
    }
    let refused = wrap(0).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    drop(device);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// Enqueues fills that take some milliseconds on any device, so that later work is late.
fn delay(stream: &Stream, scratch: &DeviceBuffer<u32>) {
    for value in 0..60 {
        stream.fill(scratch, value).unwrap();
    }
}

#[test]
fn memory_allocated_on_one_stream_holds_no_late_work_on_another() {
    let Some(backend) = open("memory_allocated_on_one_stream_holds_no_late_work_on_another") else { return };
    let runtime = Runtime::new(backend).unwrap();
    let device = runtime.device(0).unwrap();
    let (home, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    // A real device fills 4 MiB faster than a program enqueues the fill.
    let is_real = device.info().memory_bytes > 16 << 30;
    let scratch = device.allocate::<u32>(if is_real { 64 << 20 } else { 1 << 20 }).unwrap();
    let mut reused = 0;
    for round in 0..20 {
        delay(&home, &scratch);
        let first = home.allocate::<u32>(1 << 16).unwrap();
        home.fill(&first, 1_u32).unwrap();
        let place = first.ptr();
        drop(first);
        let second = home.allocate::<u32>(1 << 16).unwrap();
        reused += u32::from(second.ptr() == place);
        other.fill(&second, 2_u32).unwrap();
        let early = other.download(&second).unwrap();
        home.synchronize().unwrap();
        let late = other.download(&second).unwrap();
        assert!(early.iter().chain(&late).all(|value| *value == 2), "round {round}");
    }
    // Without reuse, the test proves nothing.
    assert!(reused > 0, "the device gave out other memory in each round");
    drop((home, other, scratch, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn events_do_not_grow_with_the_uses_of_a_buffer_that_is_only_copied_from() {
    const THREADS: usize = 16;
    let name = "events_do_not_grow_with_the_uses_of_a_buffer_that_is_only_copied_from";
    let Some(backend) = open(name) else { return };
    let runtime = Runtime::new(backend.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let mut constant = runtime.pinned::<f32>(1024).unwrap();
    constant.write().unwrap().fill(1.0);
    let shape = GemmShape::of::<f32>(32, 32, 32);
    let rounds = |count: usize| {
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let stream = device.create_stream().unwrap();
                    let [a, c] = [(); 2].map(|()| device.allocate::<f32>(1024).unwrap());
                    let mut result = runtime.pinned::<f32>(1024).unwrap();
                    for _ in 0..count {
                        stream.copy_to_device(&constant, &a).unwrap();
                        stream.blas().unwrap().gemm(&shape, 1.0, &a, &a, 0.0, &c).unwrap();
                        stream.copy_to_host(&c, &mut result).unwrap();
                    }
                    assert!(result.read().unwrap().iter().all(|value| *value == 32.0));
                });
            }
        });
        runtime.backend().live_objects().events
    };
    let few = rounds(10);
    // A real device needs seconds to show growth.
    let is_real = device.info().memory_bytes > 16 << 30;
    let many = rounds(if is_real { 20_000 } else { 500 });
    // Each thread has a few events in flight for each stream. A count that grew with the rounds would reach thousands.
    assert!(many <= few + 40 * THREADS as u64, "{few} events after 10 rounds, {many} after many");
    drop((constant, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// The growth creates and maps memory while the stream is captured. Neither ends the capture.
#[test]
fn memory_allocated_in_a_capture_serves_its_graph() -> Result<()> {
    const MIB: usize = 1 << 20;
    let Some(backend) = open("memory_allocated_in_a_capture_serves_its_graph") else { return Ok(()) };
    for (mode, plain) in [(CaptureMode::Global, false), (CaptureMode::ThreadLocal, false), (CaptureMode::Relaxed, true)]
    {
        let memory = DeviceMemoryOptions::new().with_plain_allocations(plain);
        let options = RuntimeOptions::new().with_device_memory(memory);
        let runtime = Runtime::with_options(Arc::clone(&backend), &options)?;
        let device = runtime.device(0)?;
        let (stream, other) = (device.create_stream()?, device.create_stream()?);
        let results: Vec<_> = (0..4).map(|_| device.allocate::<u32>(MIB)).collect::<Result<_>>()?;
        let mut graph = stream.capture_with(mode, |stream| {
            for (value, result) in (1..).zip(&results) {
                let scratch = stream.allocate::<u32>(MIB)?;
                stream.fill(&scratch, value)?;
                other.wait(&stream.record()?)?;
                stream.copy(&scratch, result)?;
                drop(scratch);
                // Grows again.
                let more = stream.allocate::<u32>((value as usize + 1) * MIB)?;
                other.fill(&more, 9)?;
                stream.wait(&other.record()?)?;
            }
            Ok(())
        })?;
        for _ in 0..3 {
            graph.launch(&stream)?;
            let own = other.allocate::<u32>(4 * MIB)?;
            other.fill(&own, 77)?;
        }
        for (value, result) in (1..).zip(&results) {
            assert!(stream.download(result)?.iter().all(|each| *each == value), "{mode:?}, plain: {plain}");
        }
        drop((graph, results));
        device.synchronize()?;
        runtime.trim()?;
        assert_eq!(runtime.statistics().device_memory.held_bytes, 0);
        drop((stream, other, device));
        assert_eq!(runtime.close()?.total(), 0);
    }
    Ok(())
}

/// Makes the primary context of the first device current, as foreign code does.
fn enter_context() {
    use cudarc::driver::sys;
    let mut context = std::ptr::null_mut();
    // SAFETY: The calls write one number, which outlives them, and take the context that they returned.
    unsafe {
        assert_eq!(sys::cuDevicePrimaryCtxRetain(&mut context, 0) as u32, 0);
        assert_eq!(sys::cuCtxSetCurrent(context) as u32, 0);
    }
}

/// Maps pieces of 2 MiB next to each other, as an allocator of expandable segments does. Returns the address, and the
/// reservation.
fn map_segments(count: usize, handle_types: u32) -> u64 {
    use cudarc::driver::sys;
    const PIECE: usize = 2 << 20;
    let location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    // SAFETY: Zeros are a valid value of each field.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location;
    properties.requestedHandleTypes = sys::CUmemAllocationHandleType(handle_types);
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location, flags };
    let mut start = 0;
    // SAFETY: The calls write numbers, which outlive them. The addresses belong to this test.
    unsafe {
        assert_eq!(sys::cuMemAddressReserve(&mut start, count * PIECE, 0, 0, 0) as u32, 0);
        for index in 0..count {
            let mut memory = 0;
            assert_eq!(sys::cuMemCreate(&mut memory, PIECE, &properties, 0) as u32, 0);
            assert_eq!(sys::cuMemMap(start + (index * PIECE) as u64, PIECE, 0, memory, 0) as u32, 0);
            assert_eq!(sys::cuMemRelease(memory) as u32, 0);
        }
        assert_eq!(sys::cuMemSetAccess(start, count * PIECE, &access, 1) as u32, 0);
    }
    start
}

/// What other code allocated, freed when the last buffer over it has ended.
enum Foreign {
    Block(u64),
    Segments(u64, usize),
}

impl Drop for Foreign {
    fn drop(&mut self) {
        use cudarc::driver::sys;
        enter_context();
        // SAFETY: No work uses the memory, and it is freed here only.
        unsafe {
            match *self {
                Self::Block(address) => assert_eq!(sys::cuMemFree_v2(address) as u32, 0),
                Self::Segments(address, count) => {
                    assert_eq!(sys::cuMemUnmap(address, count * (2 << 20)) as u32, 0);
                    assert_eq!(sys::cuMemAddressFree(address, count * (2 << 20)) as u32, 0);
                }
            }
        }
    }
}

#[test]
fn memory_of_other_code_is_opened_by_another_process() {
    use cudarc::driver::sys;
    const TEST: &str = "memory_of_other_code_is_opened_by_another_process";
    const TICKET: &str = "HIGHWATER_TEST_TICKET";
    let Some(backend) = open(TEST) else { return };
    let runtime = Runtime::new(backend).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    if let Ok(tickets) = std::env::var(TICKET) {
        let mut opened = Vec::new();
        for ticket in tickets.split(',') {
            let buffer = runtime.open_shared::<f32>(&ticket.parse().unwrap()).unwrap();
            assert!(stream.download(&buffer).unwrap().iter().all(|value| *value == 1.5));
            stream.fill(&buffer, 2.5_f32).unwrap();
            opened.push(buffer);
        }
        stream.synchronize().unwrap();
        drop((opened, stream, device));
        assert_eq!(runtime.close().unwrap().total(), 0);
        return;
    }
    // A segment of `cudaMalloc`, in which two tensors lie.
    let mut block = 0;
    enter_context();
    // SAFETY: The call writes one number, which outlives it.
    assert_eq!(unsafe { sys::cuMemAlloc_v2(&mut block, 1 << 20) } as u32, 0);
    let keep = Arc::new(Foreign::Block(block));
    let at = |address: u64| highwater_core::DevicePtr::new(address);
    // SAFETY: The block keeps the bytes of both. Nothing else uses them; also below.
    let plain = unsafe {
        [
            device.adopt::<f32>(at(block + 4096), 4000, keep.clone()).unwrap(),
            device.adopt::<f32>(at(block + 65_536), 4000, keep).unwrap(),
        ]
    };
    // Four segments of 2 MiB, and a tensor that begins in the first and ends in the last one.
    let segments = map_segments(4, 1);
    let (inside, bytes) = (at(segments + (1 << 20)), 6 << 20);
    // SAFETY: As above.
    let mapped = unsafe { device.adopt::<f32>(inside, bytes, Foreign::Segments(segments, 4)) }.unwrap();
    assert_eq!(plain[0].transport().unwrap(), Transport::Legacy);
    assert_eq!(mapped.transport().unwrap(), Transport::Descriptor);
    let buffers: Vec<_> = plain.iter().chain([&mapped]).collect();
    let mut tickets = Vec::new();
    for buffer in &buffers {
        stream.fill(*buffer, 1.5_f32).unwrap();
        tickets.push(buffer.share().unwrap().to_string());
    }
    // A handle without a descriptor is made once for all processes.
    for _ in 0..2 {
        let mut other = Command::new(std::env::current_exe().unwrap());
        other.args(["--exact", TEST, "--test-threads=1"]).env(TICKET, tickets.join(","));
        let output = other.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
        for buffer in &buffers {
            assert!(stream.download(*buffer).unwrap().iter().all(|value| *value == 2.5));
            stream.fill(*buffer, 1.5_f32).unwrap();
        }
        stream.synchronize().unwrap();
    }
    drop((plain, mapped, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// A process that shares memory on request: [`share_on_request`].
struct Owner {
    child: std::process::Child,
    answers: std::io::Lines<std::io::BufReader<std::process::ChildStdout>>,
}

impl Owner {
    const IS_OWNER: &str = "HIGHWATER_TEST_OWNER";
    const ANSWER: &str = "answer: ";

    fn start(test: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--test-threads=1", "--nocapture"]).env(Self::IS_OWNER, "1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, answers }
    }

    fn ask(&mut self, request: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{request}").unwrap();
        let mut lines = self.answers.by_ref().map(Result::unwrap);
        // The test's name is in front of the first answer.
        lines.find_map(|line| line.split_once(Self::ANSWER).map(|(_, answer)| answer.to_owned())).unwrap()
    }

    fn share(&mut self, value: u32) -> Ticket {
        self.ask(&format!("share {value}")).parse().unwrap()
    }

    #[track_caller]
    fn wait_until_nothing_is_held(&mut self) {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while self.ask("held") != "0" {
            assert!(std::time::Instant::now() < until, "the owner still counts opens");
        }
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: Sends a signal to the child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
        let (mut status, until) = (0, if signal == libc::SIGSTOP { libc::WUNTRACED } else { libc::WCONTINUED });
        if signal != libc::SIGKILL {
            // SAFETY: Waits until the child has stopped or continued.
            unsafe { libc::waitpid(self.child.id() as libc::pid_t, &mut status, until) };
        }
    }
}

/// A failed test leaves no stopped process.
impl Drop for Owner {
    fn drop(&mut self) {
        self.child.kill().unwrap_or_default();
        drop(self.child.wait());
    }
}

/// Shares memory without descriptors, drops it, and counts the allocations that other processes hold after that.
fn share_on_request(runtime: &Runtime) {
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let mut buffers = Vec::new();
    let make = |value: &str| {
        let buffer = device.allocate_shared_by::<u32>(1000, Transport::Legacy).unwrap();
        stream.fill(&buffer, value.parse::<u32>().unwrap()).unwrap();
        // A stopped owner does not report the end of its work.
        stream.synchronize().unwrap();
        buffer
    };
    let (mut blocking, mut watches) = (Vec::new(), Vec::new());
    for request in std::io::stdin().lines().map(|line| line.unwrap()) {
        let answer = match request.split_once(' ').unwrap_or((&request, "")) {
            ("share", value) => {
                buffers.push(Some(make(value)));
                buffers.last().and_then(Option::as_ref).unwrap().share().unwrap().to_string()
            }
            ("batch", value) => {
                let two = [make(value), make(value)];
                let slices: Vec<_> = two.iter().map(|buffer| buffer.slice(0..1000).unwrap()).collect();
                let batch = runtime.share_all(&slices).unwrap();
                drop(slices);
                buffers.extend(two.map(Some));
                batch.to_string()
            }
            ("again", place) => buffers[place.parse::<usize>().unwrap()].as_ref().unwrap().share().unwrap().to_string(),
            ("drop", place) => {
                buffers[place.parse::<usize>().unwrap()] = None;
                "dropped".to_owned()
            }
            // Keeps the sharing thread busy from the death of a ticket's owner until `unblock`.
            ("block", ticket) => {
                let (sender, blocked) = std::sync::mpsc::channel::<()>();
                blocking.push(sender);
                let foreign = runtime.open_shared::<u32>(&ticket.parse().unwrap()).unwrap();
                let call = move || blocked.recv().unwrap_or_default();
                watches.push((foreign.owner().unwrap().on_death(call).unwrap(), foreign));
                "blocked".to_owned()
            }
            ("unblock", _) => {
                blocking.clear();
                "unblocked".to_owned()
            }
            ("exec", _) => panic!("{}", std::os::unix::process::CommandExt::exec(Command::new("sleep").arg("60"))),
            _ => runtime.statistics().sharing.limbo_blocks.to_string(),
        };
        println!("{}{answer}", Owner::ANSWER);
    }
}

/// Returns the runtime of a test in the run over the simulation. `None` after that run, and in the processes of [`Owner`], once they have
/// served the test.
fn runtime_beside_owners(test: &str) -> Option<Runtime> {
    let runtime = Runtime::new(open(test)?).unwrap();
    if std::env::var(Owner::IS_OWNER).is_ok() {
        share_on_request(&runtime);
        return None;
    }
    Some(runtime)
}

#[test]
fn later_allocations_of_an_owner_are_opened_without_a_request() {
    const TEST: &str = "later_allocations_of_an_owner_are_opened_without_a_request";
    let Some(runtime) = runtime_beside_owners(TEST) else { return };
    let mut owner = Owner::start(TEST);
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let first = owner.share(7);
    // The owner does not know this process yet, so the open sends a request.
    owner.signal(libc::SIGSTOP);
    assert_eq!(runtime.open_shared::<u32>(&first).map(drop).unwrap_err().kind(), ErrorKind::InvalidState);
    owner.signal(libc::SIGCONT);
    drop(runtime.open_shared::<u32>(&first).unwrap());
    let later = owner.share(8);
    let batch: TicketBatch = owner.ask("batch 9").parse().unwrap();
    owner.signal(libc::SIGSTOP);
    let opened = runtime.open_shared::<u32>(&later).unwrap();
    assert!(stream.download(&opened).unwrap().iter().all(|value| *value == 8));
    let others = runtime.open_shared_all::<u32>(&batch).unwrap();
    assert!(others.iter().all(|buffer| stream.download(buffer).unwrap()[999] == 9));
    drop(runtime.open_shared::<u32>(&later).unwrap());
    owner.signal(libc::SIGCONT);
    // The owner knows what this process holds.
    for place in 1..4 {
        assert_eq!(owner.ask(&format!("drop {place}")), "dropped");
    }
    assert_eq!(owner.ask("held"), "3");
    assert_eq!(runtime.open_shared::<u32>(&later).map(drop).unwrap_err().kind(), ErrorKind::Expired);
    assert!(stream.download(&opened).unwrap().iter().all(|value| *value == 8));
    drop((opened, others));
    owner.wait_until_nothing_is_held();
    // One that was dropped before it was opened, and one of a dead owner.
    let (dropped, left) = (owner.share(11), owner.share(12));
    assert_eq!(owner.ask("drop 4"), "dropped");
    assert_eq!(runtime.open_shared::<u32>(&dropped).map(drop).unwrap_err().kind(), ErrorKind::Expired);
    owner.signal(libc::SIGKILL);
    owner.child.wait().unwrap();
    assert_eq!(runtime.open_shared::<u32>(&left).map(drop).unwrap_err().kind(), ErrorKind::Expired);
    drop((stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// The owner would grant the request later, and take it back. Failed before: it then freed memory that this process had open.
#[test]
fn an_open_is_a_request_while_the_owner_has_not_read_an_earlier_one() {
    const TEST: &str = "an_open_is_a_request_while_the_owner_has_not_read_an_earlier_one";
    let Some(runtime) = runtime_beside_owners(TEST) else { return };
    let (mut owner, mut third) = (Owner::start(TEST), Owner::start(TEST));
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    // The first share is before this process is known, so it prepares nothing.
    let first = owner.share(5);
    drop(runtime.open_shared::<u32>(&owner.share(7)).unwrap());
    let theirs = third.share(1);
    assert_eq!(owner.ask(&format!("block {theirs}")), "blocked");
    drop(third);
    std::thread::sleep(std::time::Duration::from_millis(300));
    let refusal = |ticket| runtime.open_shared::<u32>(ticket).map(drop).unwrap_err().kind();
    owner.signal(libc::SIGSTOP);
    assert_eq!(refusal(&first), ErrorKind::InvalidState);
    owner.signal(libc::SIGCONT);
    let prepared: Ticket = owner.ask("again 0").parse().unwrap();
    assert_eq!(refusal(&prepared), ErrorKind::InvalidState);
    assert_eq!(owner.ask("unblock"), "unblocked");
    let opened = runtime.open_shared::<u32>(&prepared).unwrap();
    assert_eq!(owner.ask("drop 0"), "dropped");
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_eq!(owner.ask("held"), "1");
    assert!(stream.download(&opened).unwrap().iter().all(|value| *value == 5));
    // Prepared opens are taken again.
    let later = owner.share(6);
    owner.signal(libc::SIGSTOP);
    assert_eq!(stream.download(&runtime.open_shared::<u32>(&later).unwrap()).unwrap()[999], 6);
    owner.signal(libc::SIGCONT);
    drop((opened, stream));
    owner.wait_until_nothing_is_held();
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// Failed before: the driver's error for the handle of a process that was being taken apart.
#[test]
fn an_open_beside_the_end_of_its_owner_returns_expired() {
    const TEST: &str = "an_open_beside_the_end_of_its_owner_returns_expired";
    let Some(runtime) = runtime_beside_owners(TEST) else { return };
    for end in [libc::SIGKILL, libc::SIGTERM, 0] {
        let mut owner = Owner::start(TEST);
        drop(runtime.open_shared::<u32>(&owner.share(7)).unwrap());
        let tickets: Vec<Ticket> = (0..40).map(|value| owner.share(value)).collect();
        if end == 0 {
            writeln!(owner.child.stdin.as_mut().unwrap(), "exec").unwrap();
        } else {
            // SAFETY: Sends a signal to the child, which has not been waited for.
            assert_eq!(unsafe { libc::kill(owner.child.id() as libc::pid_t, end) }, 0);
        }
        let until = std::time::Instant::now() + std::time::Duration::from_millis(200);
        while std::time::Instant::now() < until {
            for ticket in &tickets {
                if let Err(error) = runtime.open_shared::<u32>(ticket) {
                    assert_eq!(error.kind(), ErrorKind::Expired, "{end}: {error}");
                }
            }
            runtime.trim().unwrap();
        }
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn memory_that_cannot_be_adopted_or_shared_is_refused_with_the_reason() {
    use cudarc::driver::sys;
    let Some(backend) = open("memory_that_cannot_be_adopted_or_shared_is_refused_with_the_reason") else { return };
    let runtime = Runtime::new(backend).unwrap();
    let device = runtime.device(0).unwrap();
    let refusal = |address: u64| {
        // SAFETY: The call must be refused.
        let adopted = unsafe { device.adopt::<u8>(highwater_core::DevicePtr::new(address), 64, ()) };
        adopted.map(drop).unwrap_err().kind()
    };
    enter_context();
    let (mut managed, mut ordered, mut pinned) = (0, 0, std::ptr::null_mut());
    // SAFETY: The calls write numbers, which outlive them.
    unsafe {
        assert_eq!(sys::cuMemAllocManaged(&mut managed, 4096, 1) as u32, 0);
        assert_eq!(sys::cuMemAllocAsync(&mut ordered, 4096, std::ptr::null_mut()) as u32, 0);
        assert_eq!(sys::cuMemHostAlloc(&mut pinned, 4096, 0) as u32, 0);
    }
    let stream = device.create_stream().unwrap();
    // SAFETY: The call takes no pointer. The allocation in the order of the default stream is done afterward.
    assert_eq!(unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) } as u32, 0);
    for (address, said) in [(managed, "managed"), (ordered, "order of streams")] {
        let at = highwater_core::DevicePtr::new(address);
        // SAFETY: The memory is freed at the end of the test, and nothing else uses it.
        let buffer = unsafe { highwater_core::DeviceBuffer::<u32>::from_raw(&device, at, 1024) }.unwrap();
        stream.fill(&buffer, 5_u32).unwrap();
        assert_eq!(stream.download(&buffer).unwrap(), [5; 1024]);
        let error = buffer.share().map(drop).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains(said), "{error}");
    }
    assert_eq!(refusal(pinned.addr() as u64), ErrorKind::InvalidPointer);
    assert_eq!(refusal(64), ErrorKind::InvalidPointer);
    // Mapped memory without a handle type works in this process alone.
    let private = map_segments(1, 0);
    let at = highwater_core::DevicePtr::new(private);
    // SAFETY: The mapping keeps the bytes, and nothing else uses them.
    let buffer = unsafe { device.adopt::<u32>(at, 4096, Foreign::Segments(private, 1)) }.unwrap();
    stream.fill(&buffer, 3_u32).unwrap();
    assert_eq!(stream.download(&buffer).unwrap(), vec![3; 1024]);
    let error = buffer.share().map(drop).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("mapped without"), "{error}");
    drop((buffer, stream));
    // SAFETY: Nothing uses them.
    unsafe {
        assert_eq!(sys::cuMemFree_v2(managed) as u32, 0);
        assert_eq!(sys::cuMemFreeAsync(ordered, std::ptr::null_mut()) as u32, 0);
        assert_eq!(sys::cuMemFreeHost(pinned) as u32, 0);
    }
    drop(device);
    assert_eq!(runtime.close().unwrap().total(), 0);
}
