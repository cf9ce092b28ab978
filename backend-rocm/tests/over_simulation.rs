//! Tests of the harmful behavior of AMD's libraries that the backend keeps from programs. The tests are named for the
//! numbers in `docs/rocm.md`.
//!
//! Each test runs again under `scripts/simulated.sh`, which puts simulated libraries in the place of AMD's, once as HIP
//! 7 and once as HIP 6. With `HIGHWATER_TEST_INSIDE` set to 7 or 6, the tests run over the libraries that the loader
//! finds, including real ones. If a test states that the vendor does harm, it makes the call without the backend and
//! observes the harm.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use highwater_core::{
    AllocateOptions, AtomicsMode, Backend, BlasHandle, BlasKind, BlasOptions, CaptureMode, Completion, CopyShape,
    DataType, DeviceMemoryKind, DevicePtr, Epilogue, ErrorKind, EventHandle, EventId, EventOptions, FillPattern, Gemm,
    GemmShape, HostMemoryKind, HostOptions, HostPtr, Location, MathMode, MemoryCopy, MemoryCopy2d, MemoryFill,
    MemoryHandle, PlanOptions, RangeKind, Runtime, StreamId, StreamOptions, StreamPriority, Ticket, Transport,
    Workspace,
};
use highwater_simulated_harness::{isolated, script, values};

/// Returns whether this is the run over libraries. Otherwise, starts the run over both versions, with `settings` in the
/// environment.
fn inside_with(test: &str, settings: &[(&str, &str)]) -> bool {
    if isolated::version().is_some() {
        return true;
    }
    // More devices than any test needs.
    isolated::outside(test, &["rocm", "rocm6"], &[&[("HIGHWATER_MOCK", "devices=2")], settings].concat(), None);
    false
}

/// Returns the backend in the run over libraries. Returns `None` after that run.
fn open(test: &str) -> Option<Arc<dyn Backend>> {
    inside_with(test, &[]).then(|| highwater_rocm::open().unwrap())
}

/// Returns a function of the runtime that the backend has opened, without the backend.
///
/// # Safety
/// The caller must name a function of that type.
unsafe fn hip<F: Copy>(symbol: &str) -> F {
    // SAFETY: As the caller promises.
    unsafe { of_library("libamdhip64.so", symbol) }
}

/// Returns a function of a library that the backend has opened, without the backend.
///
/// # Safety
/// The caller must name a function of that type.
unsafe fn of_library<F: Copy>(library: &str, symbol: &str) -> F {
    let file = highwater_driver::loaded_files(library).pop().unwrap();
    // SAFETY: The library is in this process already; the caller promises the type.
    unsafe {
        let library = std::mem::ManuallyDrop::new(libloading::Library::new(file).unwrap());
        *library.get::<F>(symbol.as_bytes()).unwrap()
    }
}

/// Returns the major version of HIP.
fn major() -> i32 {
    let mut version = 0;
    // SAFETY: The call writes one number, which outlives it.
    let code = unsafe { hip::<unsafe extern "C" fn(*mut i32) -> i32>("hipRuntimeGetVersion")(&mut version) };
    assert_eq!(code, 0);
    version / 10_000_000
}

fn stream(backend: &dyn Backend) -> StreamId {
    backend.create_stream(0, &StreamOptions::new()).unwrap()
}

fn allocate(backend: &dyn Backend, bytes: usize) -> DevicePtr {
    backend.allocate(0, &AllocateOptions::new(bytes)).unwrap()
}

fn fill(backend: &dyn Backend, block: DevicePtr, value: u8, bytes: usize, stream: StreamId) {
    // SAFETY: The tests name ranges inside blocks that live until the stream was waited for.
    unsafe { backend.fill(&MemoryFill::new(0, block, FillPattern::U8(value), bytes), stream) }.unwrap();
}

/// Returns the bytes in device memory after the work of `stream`.
fn bytes_of(backend: &dyn Backend, block: DevicePtr, bytes: usize, stream: StreamId) -> Vec<u8> {
    let host = backend.host_allocator();
    let room = host.allocate(bytes, &HostOptions::new()).unwrap();
    let copy = MemoryCopy::new(Location::Host(room), Location::Device { device: 0, ptr: block }, bytes);
    // SAFETY: Both ranges are allocated, and the copy is done when the room is read.
    unsafe {
        backend.copy(&copy, stream).unwrap();
        backend.synchronize_stream(stream).unwrap();
        let seen = std::slice::from_raw_parts(room.as_ptr(), bytes).to_vec();
        host.free(room).unwrap();
        seen
    }
}

fn free(backend: &dyn Backend, block: DevicePtr) {
    // SAFETY: The tests have waited for what uses it.
    unsafe { backend.free(0, block, None) }.unwrap();
}

/// Whole pages of memory of this process that are not page-locked.
fn pages(count: usize) -> (Vec<u8>, HostPtr) {
    let mut memory = vec![0_u8; (count + 1) * 4096];
    let start = memory.as_mut_ptr();
    // SAFETY: The vector is longer by a page than what is used from there on.
    let aligned = unsafe { start.add(start.align_offset(4096)) };
    (memory, HostPtr::new(std::ptr::NonNull::new(aligned).unwrap()))
}

fn with_offset(ptr: HostPtr, offset: usize) -> HostPtr {
    // SAFETY: The tests stay inside their memory.
    HostPtr::new(std::ptr::NonNull::new(unsafe { ptr.as_ptr().add(offset) }).unwrap())
}

fn blas(backend: &dyn Backend) -> Box<dyn BlasHandle> {
    backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap()
}

/// Checks that no object of any kind is live.
#[track_caller]
fn nothing_is_left(backend: &dyn Backend) {
    assert_eq!(backend.live_objects().total(), 0, "{:?}", backend.live_objects());
}

#[test]
fn r2_1_properties_are_read_in_the_layout_of_hip_6() {
    let Some(backend) = open("r2_1_properties_are_read_in_the_layout_of_hip_6") else { return };
    for device in 0..backend.device_count() {
        let info = backend.device_info(device).unwrap();
        assert!(info.architecture.starts_with("gfx"), "{info:?}");
        assert!(!info.name.is_empty() && info.memory_bytes > 0, "{info:?}");
    }
    // The symbol without a suffix fills another layout, in which this range holds no architecture.
    let mut properties = vec![0_u8; 4096];
    // SAFETY: There is room for either layout.
    let code = unsafe {
        hip::<unsafe extern "C" fn(*mut u8, i32) -> i32>("hipGetDeviceProperties")(properties.as_mut_ptr(), 0)
    };
    assert_eq!((code, properties[1160..1163] == *b"gfx", properties[396..399] == *b"gfx"), (0, false, true));
}

#[test]
fn r2_2_whose_an_address_is_is_known_without_asking_for_its_kind() {
    let Some(backend) = open("r2_2_whose_an_address_is_is_known_without_asking_for_its_kind") else { return };
    let host = backend.host_allocator();
    let block = allocate(&*backend, 4096);
    let room = host.allocate(4096, &HostOptions::new()).unwrap();
    let host_address = DevicePtr::new(room.address() as u64);
    // SAFETY: What is refused is not freed.
    unsafe {
        assert_eq!(backend.free(0, host_address, None).unwrap_err().kind(), ErrorKind::InvalidPointer);
        let device_address = HostPtr::new(std::ptr::NonNull::new(block.get() as *mut u8).unwrap());
        assert_eq!(host.free(device_address).unwrap_err().kind(), ErrorKind::InvalidPointer);
        assert_eq!(host.unregister(device_address).unwrap_err().kind(), ErrorKind::InvalidPointer);
        host.free(room).unwrap();
    }
    free(&*backend, block);
    nothing_is_left(&*backend);
}

/// A struct as in the vendor's header, because C passes an array by reference.
#[derive(Clone, Copy)]
#[repr(C)]
struct IpcHandle([u8; 64]);

type OpenHandle = unsafe extern "C" fn(*mut u64, IpcHandle, u32) -> i32;

#[test]
fn r2_3_memory_of_another_process_opens_with_the_flag_of_hip_6() {
    const TEST: &str = "r2_3_memory_of_another_process_opens_with_the_flag_of_hip_6";
    const TICKET: &str = "HIGHWATER_TEST_TICKET";
    let Some(backend) = open(TEST) else { return };
    let runtime = Runtime::new(Arc::clone(&backend)).unwrap();
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
    // The flag of HIP 5 is refused.
    let mut address = 0;
    // SAFETY: The call writes one number, if anything.
    let code = unsafe { hip::<OpenHandle>("hipIpcOpenMemHandle")(&mut address, IpcHandle([0; 64]), 0) };
    assert_eq!((code, address), (1, 0));
    let buffer = device.allocate_shared_by::<f32>(1000, Transport::Legacy).unwrap();
    stream.fill(&buffer, 1.5_f32).unwrap();
    let ticket = buffer.share().unwrap();
    assert_eq!(ticket.transport(), Transport::Legacy);
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--exact", TEST, "--test-threads=1"]).env(TICKET, ticket.to_string());
    assert!(other.status().unwrap().success());
    let values = stream.download(&buffer).unwrap();
    assert!(values[..500].iter().all(|value| *value == 2.5) && values[500..].iter().all(|value| *value == 1.5));
    drop((buffer, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// Checks the product of two 2 x 2 matrices in column order, with the first transposed or not. A is 1, 2, 3, 4 and B is
/// 1, 0, 0, 2.
fn product(backend: &dyn Backend, factors: DataType, result: DataType, transposed: bool, mode: MathMode) {
    let number_of = |data_type: DataType| match data_type {
        DataType::F16 => values::F16,
        DataType::Bf16 => values::BF16,
        DataType::F32 => values::F32,
        _ => values::F64,
    };
    let stream = stream(backend);
    let (a, b, c) = (allocate(backend, 256), allocate(backend, 256), allocate(backend, 256));
    let host = backend.host_allocator();
    let room = host.allocate(64, &HostOptions::new()).unwrap();
    for (block, values) in [(a, [1.0, 2.0, 3.0, 4.0]), (b, [1.0, 0.0, 0.0, 2.0])] {
        let bytes = values::encode(number_of(factors), &values);
        // SAFETY: The room holds 64 bytes, and the copy is waited for before it is written again.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), room.as_ptr(), bytes.len());
            let to = Location::Device { device: 0, ptr: block };
            backend.copy(&MemoryCopy::new(to, Location::Host(room), bytes.len()), stream).unwrap();
            backend.synchronize_stream(stream).unwrap();
        }
    }
    let mut handle = blas(backend);
    handle.set_stream(stream).unwrap();
    handle.set_math_mode(mode).unwrap();
    let mut shape = GemmShape::new(factors, 2, 2, 2).with_output(result);
    if transposed {
        shape = shape.with_transposed_a();
    }
    // SAFETY: The matrices lie inside the blocks.
    unsafe { handle.gemm(&Gemm::new(shape, a, b, c)) }.unwrap();
    let size = result.bytes();
    let seen = bytes_of(backend, c, 4 * size, stream);
    let expected = if transposed { [1.0, 3.0, 4.0, 8.0] } else { [1.0, 2.0, 6.0, 8.0] };
    let expected = values::encode(number_of(result), &expected);
    assert_eq!(seen, expected, "{factors:?} to {result:?}, transposed: {transposed}");
    handle.destroy().unwrap();
    for block in [a, b, c] {
        free(backend, block);
    }
    // SAFETY: The copies are done.
    unsafe { host.free(room) }.unwrap();
    backend.destroy_stream(stream).unwrap();
}

#[test]
fn r2_4_products_of_every_type_are_right_in_both_versions_of_hipblas() {
    let Some(backend) = open("r2_4_products_of_every_type_are_right_in_both_versions_of_hipblas") else { return };
    let types = [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64];
    for data_type in types {
        product(&*backend, data_type, data_type, false, MathMode::Default);
    }
    for factors in [DataType::F16, DataType::Bf16] {
        product(&*backend, factors, DataType::F32, false, MathMode::Default);
    }
    // The compute type of TF32 is refused on every architecture.
    assert!(!backend.capabilities(0).unwrap().tf32);
    assert_eq!(blas(&*backend).set_math_mode(MathMode::Tf32).unwrap_err().kind(), ErrorKind::Unsupported);
    nothing_is_left(&*backend);
}

#[test]
fn r2_5_transposes_have_the_numbers_of_hipblas() {
    let Some(backend) = open("r2_5_transposes_have_the_numbers_of_hipblas") else { return };
    for data_type in [DataType::F32, DataType::F64] {
        product(&*backend, data_type, data_type, true, MathMode::Default);
    }
    nothing_is_left(&*backend);
}

/// Returns the folder of the libraries that the loader finds first, and the folder of the other version.
fn folders() -> [PathBuf; 2] {
    let path = std::env::var("LD_LIBRARY_PATH").unwrap();
    let own = PathBuf::from(path.split(':').next().unwrap());
    let other = if own.ends_with("rocm6") { "rocm" } else { "rocm6" };
    let other = own.with_file_name(other);
    [own, other]
}

fn file_in(folder: &Path, name: &str) -> PathBuf {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    files.into_iter().find(|file| file.file_name().unwrap().to_str().unwrap().starts_with(name)).unwrap()
}

#[test]
fn r2_6_libraries_of_two_releases_are_refused() {
    const TEST: &str = "r2_6_libraries_of_two_releases_are_refused";
    if isolated::version().is_none() {
        // Both must exist before one runs.
        let _folders = ["rocm", "rocm6"].map(script::folder);
    }
    if !inside_with(TEST, &[]) {
        return;
    }
    let [own, other] = folders();
    let set = |variable: &str, value: Option<&Path>| {
        // SAFETY: The process has no other thread that reads the environment: libtest's main thread waits for this one.
        unsafe {
            match value {
                Some(value) => std::env::set_var(variable, value),
                None => std::env::remove_var(variable),
            }
        }
    };
    // The hipBLAS of the other release.
    let hipblas = file_in(&other, "libhipblas.so");
    set("HIGHWATER_HIPBLAS_LIBRARY", Some(&hipblas));
    let error = highwater_rocm::open().unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.message().contains(hipblas.to_str().unwrap()), "{error}");
    assert!(error.hint().contains("HIGHWATER_HIPBLAS_LIBRARY"), "{error}");
    // The matching hipBLAS, by its full path.
    set("HIGHWATER_HIPBLAS_LIBRARY", Some(&file_in(&own, "libhipblas.so")));
    assert!(highwater_rocm::open().is_ok());
    set("HIGHWATER_HIPBLAS_LIBRARY", None);
    // The HIP of the other major version, beside the loaded one.
    set("HIGHWATER_HIP_LIBRARY", Some(&file_in(&other, "libamdhip64.so")));
    let error = highwater_rocm::open().unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
    assert!(error.message().contains("two major versions"), "{error}");
    // The loaded HIP still works, also by its full path.
    set("HIGHWATER_HIP_LIBRARY", Some(&file_in(&own, "libamdhip64.so")));
    let backend = highwater_rocm::open().unwrap();
    free(&*backend, allocate(&*backend, 64));
}

#[test]
fn r2_8_a_workspace_without_memory_is_accepted_and_the_handle_still_multiplies() {
    const TEST: &str = "r2_8_a_workspace_without_memory_is_accepted_and_the_handle_still_multiplies";
    let Some(backend) = open(TEST) else { return };
    let mut handle = blas(&*backend);
    if major() >= 7 {
        // SAFETY: The vendor's function, with its arguments, and a handle that is alive.
        unsafe {
            let set =
                of_library::<unsafe extern "C" fn(u64, u64, usize) -> i32>("libhipblas.so", "hipblasSetWorkspace");
            assert_eq!(set(handle.raw(), 0, 5), 0);
        }
    }
    // SAFETY: No memory is bound.
    unsafe { handle.set_workspace(None) }.unwrap();
    let stream = stream(&*backend);
    handle.set_stream(stream).unwrap();
    let block = allocate(&*backend, 4096);
    fill(&*backend, block, 0, 4096, stream);
    let gemm = Gemm::new(GemmShape::new(DataType::F32, 2, 2, 2), block, block.offset(256), block.offset(512));
    // SAFETY: The matrices are inside the block.
    unsafe { handle.gemm(&gemm) }.unwrap();
    assert!(bytes_of(&*backend, block, 4096, stream).iter().all(|byte| *byte == 0));
    handle.destroy().unwrap();
    free(&*backend, block);
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r2_7_a_code_that_no_header_knows_is_an_error_with_its_number() {
    const TEST: &str = "r2_7_a_code_that_no_header_knows_is_an_error_with_its_number";
    if !inside_with(TEST, &[("HIGHWATER_SIMULATED_HIP", "unknown-code=hipMalloc")]) {
        return;
    }
    let backend = highwater_rocm::open().unwrap();
    let error = backend.allocate(0, &AllocateOptions::new(64)).unwrap_err();
    assert_eq!((error.kind(), error.code()), (ErrorKind::Vendor, Some(921)), "{error}");
    free(&*backend, allocate(&*backend, 64));
}

/// Loses the capture in which the stream takes part.
fn lose(backend: &dyn Backend, stream: StreamId) {
    let raw = backend.raw_stream(stream).unwrap();
    // SAFETY: The stream is alive. Asking is what a capture forbids.
    assert_ne!(unsafe { hip::<unsafe extern "C" fn(u64) -> i32>("hipStreamQuery")(raw) }, 0);
}

/// Ends the capture of a stream, and runs its graph once.
fn replay(backend: &dyn Backend, stream: StreamId) {
    // SAFETY: The tests began the capture, and its blocks outlive the launch.
    unsafe {
        let graph = backend.end_capture(stream).unwrap();
        let executable = backend.instantiate_graph(graph).unwrap();
        backend.launch_graph(executable, stream).unwrap();
        backend.synchronize_stream(stream).unwrap();
        backend.destroy_graph_exec(executable).unwrap();
        backend.destroy_graph(graph).unwrap();
    }
}

#[test]
fn r3_1_streams_that_died_with_a_capture_work_again_under_their_ids() {
    let Some(backend) = open("r3_1_streams_that_died_with_a_capture_work_again_under_their_ids") else { return };
    let (first, joined) = (stream(&*backend), stream(&*backend));
    let block = allocate(&*backend, 4096);
    let mut handle = blas(&*backend);
    handle.set_stream(first).unwrap();
    let raw = [first, joined].map(|stream| backend.raw_stream(stream).unwrap());
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    // Earlier work, after which later work must run.
    fill(&*backend, block, 1, 4096, first);
    backend.begin_capture(first, CaptureMode::ThreadLocal).unwrap();
    fill(&*backend, block, 9, 4096, first);
    backend.record_event(event, first).unwrap();
    backend.stream_wait_event(joined, event).unwrap();
    assert!(backend.is_capturing(joined).unwrap());
    lose(&*backend, first);
    // SAFETY: This test began it.
    let error = unsafe { backend.end_capture(first) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Capture, "{error}");
    // The destruction of the first stream freed the other.
    assert_ne!(backend.raw_stream(first).unwrap(), raw[0]);
    assert_eq!(backend.raw_stream(joined).unwrap(), raw[1]);
    assert!([first, joined].into_iter().all(|stream| !backend.is_capturing(stream).unwrap()));
    assert!(bytes_of(&*backend, block, 4096, first).iter().all(|byte| *byte == 1));
    fill(&*backend, block, 2, 4096, joined);
    assert!(bytes_of(&*backend, block, 4096, joined).iter().all(|byte| *byte == 2));
    // A handle that was bound to the dead stream.
    fill(&*backend, block, 0, 4096, joined);
    backend.synchronize_stream(joined).unwrap();
    let gemm = Gemm::new(GemmShape::new(DataType::F32, 4, 4, 4), block, block.offset(256), block.offset(512));
    // SAFETY: The matrices lie inside the block.
    unsafe { handle.gemm(&gemm) }.unwrap();
    backend.synchronize_stream(first).unwrap();
    backend.synchronize_device(0).unwrap();
    // The stream is captured again, and the graph runs.
    backend.begin_capture(first, CaptureMode::Global).unwrap();
    fill(&*backend, block, 5, 4096, first);
    replay(&*backend, first);
    assert!(bytes_of(&*backend, block, 4096, first).iter().all(|byte| *byte == 5));
    handle.destroy().unwrap();
    backend.destroy_event(event).unwrap();
    free(&*backend, block);
    for stream in [first, joined] {
        backend.destroy_stream(stream).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_1_a_capture_that_was_not_joined_leaves_working_streams() {
    let Some(backend) = open("r3_1_a_capture_that_was_not_joined_leaves_working_streams") else { return };
    let (first, joined) = (stream(&*backend), stream(&*backend));
    let block = allocate(&*backend, 64);
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        fill(&*backend, block, 1, 64, first);
        backend.begin_capture(first, mode).unwrap();
        join(&*backend, first, joined);
        fill(&*backend, block, 9, 64, joined);
        // SAFETY: This test began it.
        let error = unsafe { backend.end_capture(first) }.unwrap_err();
        assert_eq!((error.kind(), error.code()), (ErrorKind::Capture, Some(904)), "{error}");
        for stream in [joined, first] {
            assert!(!backend.is_capturing(stream).unwrap());
            assert!(bytes_of(&*backend, block, 64, stream).iter().all(|byte| *byte == 1));
        }
    }
    free(&*backend, block);
    for stream in [first, joined] {
        backend.destroy_stream(stream).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_1_a_stream_of_other_code_that_died_says_who_can_replace_it() {
    let Some(backend) = open("r3_1_a_stream_of_other_code_that_died_says_who_can_replace_it") else { return };
    let mut raw = 0;
    // SAFETY: The symbol has these arguments; the call writes one number, which outlives it.
    let code = unsafe { hip::<unsafe extern "C" fn(*mut u64, u32) -> i32>("hipStreamCreateWithFlags")(&mut raw, 1) };
    assert_eq!(code, 0);
    // SAFETY: The stream lives to the end of this test.
    let id = unsafe { backend.stream_from_raw(0, raw) }.unwrap();
    backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
    lose(&*backend, id);
    // SAFETY: This test began it.
    let error = unsafe { backend.end_capture(id) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
    assert!(error.hint().contains("the code that created it"), "{error}");
    backend.synchronize_device(0).unwrap();
    backend.destroy_stream(id).unwrap();
    // SAFETY: Nothing uses the stream any more.
    assert_eq!(unsafe { hip::<unsafe extern "C" fn(u64) -> i32>("hipStreamDestroy")(raw) }, 0);
    nothing_is_left(&*backend);
}

#[test]
fn r3_2_what_a_capture_forbids_does_not_lose_it() {
    let Some(backend) = open("r3_2_what_a_capture_forbids_does_not_lose_it") else { return };
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let (captured, other) = (stream(&*backend), stream(&*backend));
        let block = allocate(&*backend, 4096);
        let before = backend.create_event(0, &EventOptions::new()).unwrap();
        backend.record_event(before, other).unwrap();
        backend.begin_capture(captured, mode).unwrap();
        fill(&*backend, block, 3, 4096, captured);
        // Refused before HIP is called.
        assert_eq!(backend.query_stream(captured).unwrap_err().kind(), ErrorKind::Capture);
        assert_eq!(backend.synchronize_stream(captured).unwrap_err().kind(), ErrorKind::Capture);
        assert_eq!(backend.synchronize_device(0).unwrap_err().kind(), ErrorKind::Capture);
        // Made in the relaxed mode, from this thread and from another.
        let calls = || {
            backend.synchronize_event(before).unwrap();
            assert_eq!(backend.query_event(before).unwrap(), Completion::Complete);
            backend.synchronize_stream(other).unwrap();
            let more = allocate(&*backend, 4096);
            fill(&*backend, more, 1, 4096, other);
            assert!(bytes_of(&*backend, more, 4096, other).iter().all(|byte| *byte == 1));
            free(&*backend, more);
            backend.memory_info(0).unwrap();
        };
        calls();
        std::thread::scope(|scope| {
            scope.spawn(calls);
        });
        replay(&*backend, captured);
        assert!(bytes_of(&*backend, block, 4096, captured).iter().all(|byte| *byte == 3), "{mode:?}");
        free(&*backend, block);
        backend.destroy_event(before).unwrap();
        backend.destroy_stream(captured).unwrap();
        backend.destroy_stream(other).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_3_unregistering_inside_a_block_is_an_error_and_the_process_lives() {
    let Some(backend) = open("r3_3_unregistering_inside_a_block_is_an_error_and_the_process_lives") else { return };
    let host = backend.host_allocator();
    let (_memory, start) = pages(4);
    // SAFETY: The memory stays mapped, and nothing uses it on a device.
    unsafe {
        host.register(start, 4 * 4096, &HostOptions::new()).unwrap();
        for offset in [1, 64, 4096, 4 * 4096] {
            let error = host.unregister(with_offset(start, offset)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidPointer, "{error}");
        }
        assert!(host.device_address(with_offset(start, 4096), 0).is_ok());
        host.unregister(start).unwrap();
        assert_eq!(host.unregister(start).unwrap_err().kind(), ErrorKind::InvalidPointer);
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_4_an_architecture_without_kernels_is_refused_and_the_process_lives() {
    const TEST: &str = "r3_4_an_architecture_without_kernels_is_refused_and_the_process_lives";
    let empty = std::env::temp_dir().join(format!("highwater-rocm-no-kernels-{}", std::process::id()));
    if isolated::version().is_none() {
        std::fs::create_dir_all(&empty).unwrap();
    }
    let inside = inside_with(TEST, &[("ROCBLAS_TENSILE_LIBPATH", empty.to_str().unwrap())]);
    if !inside {
        std::fs::remove_dir_all(&empty).unwrap();
        return;
    }
    let backend = highwater_rocm::open().unwrap();
    let error = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let looked_in = std::env::var("ROCBLAS_TENSILE_LIBPATH").unwrap();
    for part in ["TensileLibrary_lazy_gfx942.dat", &looked_in] {
        assert!(error.message().contains(part), "{error}");
    }
    // Everything else works.
    let stream = stream(&*backend);
    let block = allocate(&*backend, 64);
    fill(&*backend, block, 7, 64, stream);
    assert_eq!(bytes_of(&*backend, block, 64, stream), [7; 64]);
    free(&*backend, block);
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_5_freeing_inside_a_block_or_another_kind_is_refused_and_the_block_stays() {
    const TEST: &str = "r3_5_freeing_inside_a_block_or_another_kind_is_refused_and_the_block_stays";
    let Some(backend) = open(TEST) else { return };
    let host = backend.host_allocator();
    let stream = stream(&*backend);
    let block = allocate(&*backend, 8192);
    let room = host.allocate(8192, &HostOptions::new()).unwrap();
    fill(&*backend, block, 4, 8192, stream);
    backend.synchronize_stream(stream).unwrap();
    // SAFETY: What is refused is not freed.
    unsafe {
        for offset in [1, 256, 4096] {
            let error = backend.free(0, block.offset(offset), None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidPointer, "{error}");
            assert_eq!(host.free(with_offset(room, offset)).unwrap_err().kind(), ErrorKind::InvalidPointer);
        }
        // The address of another device, and of another kind of memory.
        assert_eq!(backend.free(1, block, None).unwrap_err().kind(), ErrorKind::InvalidPointer);
        assert!(backend.free(0, block, Some(stream)).is_err());
        assert_eq!(host.unregister(room).unwrap_err().kind(), ErrorKind::InvalidPointer);
        assert_eq!(
            backend.free(0, DevicePtr::new(room.address() as u64), None).unwrap_err().kind(),
            ErrorKind::InvalidPointer
        );
        std::slice::from_raw_parts_mut(room.as_ptr(), 8192).fill(1);
    }
    assert!(bytes_of(&*backend, block, 8192, stream).iter().all(|byte| *byte == 4));
    free(&*backend, block);
    // SAFETY: Nothing uses it, and the second is refused.
    unsafe {
        assert_eq!(backend.free(0, block, None).unwrap_err().kind(), ErrorKind::InvalidPointer);
        host.free(room).unwrap();
        assert_eq!(host.free(room).unwrap_err().kind(), ErrorKind::InvalidPointer);
    }
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_6_registering_twice_is_refused_and_one_unregistering_undoes_one() {
    let Some(backend) = open("r3_6_registering_twice_is_refused_and_one_unregistering_undoes_one") else { return };
    let host = backend.host_allocator();
    let (_memory, start) = pages(4);
    let options = HostOptions::new();
    // SAFETY: The memory stays mapped, and nothing uses it on a device.
    unsafe {
        host.register(start, 2 * 4096, &options).unwrap();
        for (offset, bytes) in [(0, 2 * 4096), (0, 4096), (4096, 2 * 4096), (100, 8)] {
            let error = host.register(with_offset(start, offset), bytes, &options).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
        // An adjacent range.
        host.register(with_offset(start, 2 * 4096), 4096, &options).unwrap();
        host.unregister(start).unwrap();
        assert_eq!(host.unregister(start).unwrap_err().kind(), ErrorKind::InvalidPointer);
        assert!(host.device_address(with_offset(start, 2 * 4096), 0).is_ok());
        host.unregister(with_offset(start, 2 * 4096)).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_7_an_address_that_nobody_gave_out_is_an_error() {
    let Some(backend) = open("r3_7_an_address_that_nobody_gave_out_is_an_error") else { return };
    let host = backend.host_allocator();
    let (_memory, start) = pages(1);
    assert_eq!(host.device_address(start, 0).unwrap_err().kind(), ErrorKind::InvalidPointer);
    // SAFETY: What is refused is not freed.
    unsafe {
        assert_eq!(host.free(start).unwrap_err().kind(), ErrorKind::InvalidPointer);
        assert_eq!(host.unregister(start).unwrap_err().kind(), ErrorKind::InvalidPointer);
        let unknown = DevicePtr::new(start.address() as u64);
        assert_eq!(backend.free(0, unknown, None).unwrap_err().kind(), ErrorKind::InvalidPointer);
        let ipc = backend.ipc_sharing().unwrap();
        assert!(ipc.export_memory(0, unknown, Transport::Legacy).is_err());
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_8_an_error_that_the_thread_remembers_is_nobodys_answer() {
    let Some(backend) = open("r3_8_an_error_that_the_thread_remembers_is_nobodys_answer") else { return };
    let stream = stream(&*backend);
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    for _ in 0..2 {
        // One version remembers an error until the next call, the other until it is read.
        let mut size = 0;
        // SAFETY: The call fails before it reads or writes anything.
        let code = unsafe { hip::<unsafe extern "C" fn(*mut usize, i32) -> i32>("hipDeviceTotalMem")(&mut size, 99) };
        assert_ne!(code, 0);
        backend.record_event(event, stream).unwrap();
        backend.query_stream(stream).unwrap();
        backend.query_event(event).unwrap();
        backend.synchronize_event(event).unwrap();
        assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
        let block = allocate(&*backend, 64);
        fill(&*backend, block, 1, 64, stream);
        backend.synchronize_stream(stream).unwrap();
        free(&*backend, block);
    }
    backend.destroy_event(event).unwrap();
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_9_events_that_were_never_recorded_count_as_done_and_have_no_time() {
    let Some(backend) = open("r3_9_events_that_were_never_recorded_count_as_done_and_have_no_time") else { return };
    let stream = stream(&*backend);
    let timed = || backend.create_event(0, &EventOptions::new().with_timing()).unwrap();
    let (plain, start, end) = (backend.create_event(0, &EventOptions::new()).unwrap(), timed(), timed());
    assert_eq!(backend.query_event(plain).unwrap(), Completion::Complete);
    backend.synchronize_event(plain).unwrap();
    backend.stream_wait_event(stream, plain).unwrap();
    backend.synchronize_stream(stream).unwrap();
    assert_eq!(backend.event_elapsed_ns(start, end).unwrap_err().kind(), ErrorKind::InvalidArgument);
    backend.record_event(start, stream).unwrap();
    assert_eq!(backend.event_elapsed_ns(start, end).unwrap_err().kind(), ErrorKind::InvalidArgument);
    backend.record_event(end, stream).unwrap();
    backend.record_event(plain, stream).unwrap();
    assert_eq!(backend.event_elapsed_ns(start, plain).unwrap_err().kind(), ErrorKind::InvalidArgument);
    backend.synchronize_event(end).unwrap();
    backend.event_elapsed_ns(start, end).unwrap();
    for event in [plain, start, end] {
        backend.destroy_event(event).unwrap();
    }
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_10_events_for_other_processes_have_their_flags_and_own_handles_are_refused() {
    const TEST: &str = "r3_10_events_for_other_processes_have_their_flags_and_own_handles_are_refused";
    let Some(backend) = open(TEST) else { return };
    let ipc = backend.ipc_sharing().unwrap();
    let plain = backend.create_event(0, &EventOptions::new()).unwrap();
    assert_eq!(ipc.export_event(plain).unwrap_err().kind(), ErrorKind::InvalidArgument);
    // HIP's interprocess events do not reliably order work, so the capability is false.
    let interprocess = EventOptions::new().with_interprocess();
    assert!(!backend.capabilities(0).unwrap().interprocess_events);
    assert_eq!(backend.create_event(0, &interprocess).unwrap_err().kind(), ErrorKind::Unsupported);
    let both = EventOptions::new().with_interprocess().with_timing();
    assert_eq!(backend.create_event(0, &both).unwrap_err().kind(), ErrorKind::InvalidArgument);
    // Memory allocated for sharing is exported, and cannot be opened in its own process.
    let kind = DeviceMemoryKind::Shareable(Transport::Legacy);
    let block = backend.allocate(0, &AllocateOptions::new(4096).with_kind(kind)).unwrap();
    let other = allocate(&*backend, 4096);
    // SAFETY: The blocks are alive.
    unsafe {
        let handle: MemoryHandle = ipc.export_memory(0, block, Transport::Legacy).unwrap();
        assert_eq!(ipc.open_memory(0, &handle).unwrap_err().kind(), ErrorKind::InvalidArgument);
        // Other memory, interior addresses and stream-ordered memory are refused.
        assert_eq!(ipc.export_memory(0, other, Transport::Legacy).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert!(ipc.export_memory(0, block.offset(64), Transport::Legacy).is_err());
    }
    let stream = stream(&*backend);
    let ordered = AllocateOptions::new(4096).with_kind(DeviceMemoryKind::StreamOrdered(stream));
    let ordered = backend.allocate(0, &ordered).unwrap();
    // SAFETY: The block is alive, and nothing uses it when it is freed.
    unsafe {
        assert_eq!(ipc.export_memory(0, ordered, Transport::Legacy).unwrap_err().kind(), ErrorKind::InvalidArgument);
        backend.free(0, ordered, Some(stream)).unwrap();
    }
    free(&*backend, block);
    free(&*backend, other);
    backend.destroy_event(plain).unwrap();
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_11_no_bytes_are_refused_wherever_they_are_asked_for() {
    let Some(backend) = open("r3_11_no_bytes_are_refused_wherever_they_are_asked_for") else { return };
    let (host, stream) = (backend.host_allocator(), stream(&*backend));
    for kind in [
        DeviceMemoryKind::Plain,
        DeviceMemoryKind::Shareable(Transport::Legacy),
        DeviceMemoryKind::StreamOrdered(stream),
    ] {
        let error = backend.allocate(0, &AllocateOptions::new(0).with_kind(kind)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{kind:?}: {error}");
        let error = backend.allocate(0, &AllocateOptions::new(1 << 50).with_kind(kind)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{kind:?}: {error}");
    }
    assert_eq!(host.allocate(0, &HostOptions::new()).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let (_memory, start) = pages(1);
    // SAFETY: What is refused is neither registered nor freed.
    unsafe {
        assert_eq!(host.register(start, 0, &HostOptions::new()).unwrap_err().kind(), ErrorKind::InvalidArgument);
        for ordered in [None, Some(stream)] {
            let error = backend.free(0, DevicePtr::new(0), ordered).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidPointer, "{error}");
        }
    }
    // Copies and fills of 0 elements make no vendor call.
    let block = allocate(&*backend, 64);
    fill(&*backend, block, 1, 0, stream);
    backend.synchronize_stream(stream).unwrap();
    free(&*backend, block);
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_12_priorities_are_taken_from_the_range() {
    let Some(backend) = open("r3_12_priorities_are_taken_from_the_range") else { return };
    // SAFETY: The symbol has these arguments.
    let priority_of = unsafe { hip::<unsafe extern "C" fn(u64, *mut i32) -> i32>("hipStreamGetPriority") };
    // SAFETY: As above.
    let flags_of = unsafe { hip::<unsafe extern "C" fn(u64, *mut u32) -> i32>("hipStreamGetFlags") };
    for (priority, expected) in [(StreamPriority::Low, 1), (StreamPriority::Normal, 0), (StreamPriority::High, -1)] {
        let stream = backend.create_stream(0, &StreamOptions::new().with_priority(priority)).unwrap();
        let (raw, mut seen, mut flags) = (backend.raw_stream(stream).unwrap(), 9, 9);
        // SAFETY: The stream is alive, and the calls write numbers that live until they return.
        let codes = unsafe { [priority_of(raw, &mut seen), flags_of(raw, &mut flags)] };
        assert_eq!((codes, seen, flags), ([0, 0], expected, 1), "{priority:?}");
        // The replacement stream has the same priority and flags.
        backend.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
        lose(&*backend, stream);
        // SAFETY: This test began it.
        assert!(unsafe { backend.end_capture(stream) }.is_err());
        // SAFETY: As above.
        let code = unsafe { priority_of(backend.raw_stream(stream).unwrap(), &mut seen) };
        assert_eq!((code, seen), (0, expected), "{priority:?}");
        backend.destroy_stream(stream).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_13_a_destroyed_stream_is_an_error_everywhere() {
    let Some(backend) = open("r3_13_a_destroyed_stream_is_an_error_everywhere") else { return };
    let block = allocate(&*backend, 1 << 20);
    let stream = stream(&*backend);
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    let mut handle = blas(&*backend);
    handle.set_stream(stream).unwrap();
    // With unfinished work.
    for _ in 0..16 {
        fill(&*backend, block, 6, 1 << 20, stream);
    }
    backend.destroy_stream(stream).unwrap();
    let gemm = Gemm::new(GemmShape::new(DataType::F32, 2, 2, 2), block, block, block.offset(256));
    let stale = [
        backend.query_stream(stream).err(),
        backend.synchronize_stream(stream).err(),
        backend.record_event(event, stream).err(),
        backend.stream_wait_event(stream, event).err(),
        backend.raw_stream(stream).err(),
        backend.destroy_stream(stream).err(),
        backend.begin_capture(stream, CaptureMode::Relaxed).err(),
        backend.is_capturing(stream).err(),
        // SAFETY: Nothing is filled or multiplied.
        unsafe { backend.fill(&MemoryFill::new(0, block, FillPattern::U8(1), 8), stream) }.err(),
        // SAFETY: As above.
        unsafe { handle.gemm(&gemm) }.err(),
        handle.set_stream(stream).err(),
    ];
    for error in stale {
        assert_eq!(error.unwrap().kind(), ErrorKind::InvalidHandle);
    }
    // One thread uses streams, and another one destroys them.
    let shared = std::sync::Mutex::new(backend.create_stream(0, &StreamOptions::new()).unwrap());
    std::thread::scope(|scope| {
        let uses = scope.spawn(|| {
            for _ in 0..2000 {
                let id = *shared.lock().unwrap();
                if let Err(error) = backend.query_stream(id) {
                    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
                }
            }
        });
        while !uses.is_finished() {
            let next = backend.create_stream(0, &StreamOptions::new()).unwrap();
            backend.destroy_stream(std::mem::replace(&mut *shared.lock().unwrap(), next)).unwrap();
        }
        uses.join().unwrap();
    });
    backend.destroy_stream(shared.into_inner().unwrap()).unwrap();
    backend.synchronize_device(0).unwrap();
    handle.destroy().unwrap();
    backend.destroy_event(event).unwrap();
    free(&*backend, block);
    nothing_is_left(&*backend);
}

#[test]
fn r3_14_what_hip_writes_at_exit_is_no_failure() {
    let Some(backend) = open("r3_14_what_hip_writes_at_exit_is_no_failure") else { return };
    // Left until the process ends on purpose. HIP's warnings are not read, and the process exits with 0.
    let stream = stream(&*backend);
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.record_event(event, stream).unwrap();
    std::mem::forget(blas(&*backend));
    std::mem::forget(backend);
}

/// Makes `other` join the capture of `origin`.
fn join(backend: &dyn Backend, origin: StreamId, other: StreamId) {
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.record_event(event, origin).unwrap();
    backend.stream_wait_event(other, event).unwrap();
    backend.destroy_event(event).unwrap();
}

/// Returns an event that `stream` has recorded.
fn recorded_on(backend: &dyn Backend, stream: StreamId) -> EventId {
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.record_event(event, stream).unwrap();
    event
}

#[test]
fn r3_15_an_event_outlives_its_stream() {
    let Some(backend) = open("r3_15_an_event_outlives_its_stream") else { return };
    let (block, other) = (allocate(&*backend, 1 << 20), stream(&*backend));
    for round in 0..40 {
        let gone = stream(&*backend);
        fill(&*backend, block, round, 1 << 20, gone);
        let event = recorded_on(&*backend, gone);
        backend.destroy_stream(gone).unwrap();
        // Other objects may reuse the memory of the stream.
        let others: Vec<_> = (0..4).map(|_| stream(&*backend)).collect();
        match round % 3 {
            0 => while backend.query_event(event).unwrap() != Completion::Complete {},
            1 => backend.synchronize_event(event).unwrap(),
            _ => backend.stream_wait_event(other, event).unwrap(),
        }
        assert!(bytes_of(&*backend, block, 1 << 20, other).iter().all(|byte| *byte == round));
        // The event is recorded again, on a stream that may reuse the memory of the first.
        backend.record_event(event, others[0]).unwrap();
        backend.synchronize_event(event).unwrap();
        others.into_iter().for_each(|stream| backend.destroy_stream(stream).unwrap());
        assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
        backend.destroy_event(event).unwrap();
    }
    free(&*backend, block);
    backend.destroy_stream(other).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_15_threads_ask_for_events_whose_streams_come_and_go() {
    let Some(backend) = open("r3_15_threads_ask_for_events_whose_streams_come_and_go") else { return };
    let events: Vec<_> = (0..4).map(|_| backend.create_event(0, &EventOptions::new()).unwrap()).collect();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (backend, events) = (&backend, &events);
            scope.spawn(move || {
                for round in 0..60 {
                    let own = stream(&**backend);
                    let event = events[(thread + round) % 4];
                    backend.record_event(event, own).unwrap();
                    for other in events {
                        backend.query_event(*other).unwrap();
                        backend.stream_wait_event(own, *other).unwrap();
                    }
                    backend.synchronize_event(events[round % 4]).unwrap();
                    backend.destroy_stream(own).unwrap();
                }
            });
        }
    });
    events.into_iter().for_each(|event| backend.destroy_event(event).unwrap());
    nothing_is_left(&*backend);
}

/// Random calls of several threads on shared streams and events, with captures that end, are lost or are abandoned. The simulation
/// ends the process where HIP would use freed memory. `HIGHWATER_TEST_ROUNDS` sets the calls of a thread.
#[test]
fn r3_15_random_calls_on_shared_streams_and_events_break_nothing() {
    const TEST: &str = "r3_15_random_calls_on_shared_streams_and_events_break_nothing";
    let Some(backend) = open(TEST) else { return };
    let rounds: u32 = std::env::var("HIGHWATER_TEST_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1500);
    let seed: u64 = std::process::id().into();
    println!("seed {seed}");
    let streams = std::sync::Mutex::new(Vec::<StreamId>::new());
    let events = std::sync::Mutex::new(Vec::<EventId>::new());
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (backend, streams, events) = (&*backend, &streams, &events);
            scope.spawn(move || {
                let mut random = highwater_hal::SplitMix64::new(seed ^ thread << 48);
                let block = allocate(backend, 4096);
                let mut pick = |count: usize| (random.draw() % count as u64) as usize;
                // Others destroy what this thread uses, and their captures refuse some calls.
                let allowed = |result: Result<(), highwater_core::Error>| {
                    if let Err(error) = result {
                        let kinds = [ErrorKind::InvalidHandle, ErrorKind::Capture, ErrorKind::InvalidState];
                        assert!(kinds.contains(&error.kind()), "{error}");
                    }
                };
                for _ in 0..rounds {
                    let tag = backend.identity().tag;
                    let shared = {
                        let streams = streams.lock().unwrap();
                        if streams.is_empty() { None } else { Some(streams[pick(streams.len())]) }
                    };
                    let stream = match pick(8) {
                        0 => StreamId::per_thread_default(tag, 0),
                        1 => StreamId::legacy_default(tag, 0),
                        _ => shared.unwrap_or_else(|| StreamId::legacy_default(tag, 0)),
                    };
                    let event = {
                        let events = events.lock().unwrap();
                        if events.is_empty() { None } else { Some(events[pick(events.len())]) }
                    };
                    match (pick(14), event) {
                        (0, _) => streams.lock().unwrap().push(self::stream(backend)),
                        (1, _) => {
                            let gone = {
                                let mut streams = streams.lock().unwrap();
                                let place = if streams.is_empty() { None } else { Some(pick(streams.len())) };
                                place.map(|place| streams.swap_remove(place))
                            };
                            gone.into_iter().for_each(|gone| backend.destroy_stream(gone).unwrap());
                        }
                        (2, _) | (_, None) => {
                            events.lock().unwrap().push(backend.create_event(0, &EventOptions::new()).unwrap());
                        }
                        (3, Some(_)) => {
                            let gone = {
                                let mut events = events.lock().unwrap();
                                let place = pick(events.len().max(1));
                                (place < events.len()).then(|| events.swap_remove(place))
                            };
                            gone.into_iter().for_each(|gone| backend.destroy_event(gone).unwrap());
                        }
                        (4 | 5, Some(event)) => allowed(backend.record_event(event, stream)),
                        (6, Some(event)) => allowed(backend.query_event(event).map(drop)),
                        (7, Some(event)) => allowed(backend.synchronize_event(event)),
                        (8 | 9, Some(event)) => allowed(backend.stream_wait_event(stream, event)),
                        (10, _) => allowed(backend.query_stream(stream).map(drop)),
                        (11, _) => {
                            let fill = MemoryFill::new(0, block, FillPattern::U8(1), 4096);
                            // SAFETY: The block is this thread's, and lives until the device was waited for.
                            let filled = unsafe { backend.fill(&fill, stream) };
                            allowed(filled);
                        }
                        (_, Some(event)) => {
                            // A capture of streams of this thread alone (R3.1 has what another thread may not do to them).
                            let [first, joined] = [(); 2].map(|()| self::stream(backend));
                            let mode = [CaptureMode::Relaxed, CaptureMode::ThreadLocal][pick(2)];
                            backend.begin_capture(first, mode).unwrap();
                            if pick(2) == 0 {
                                allowed(backend.stream_wait_event(first, event));
                            }
                            let order = |from: StreamId, to: StreamId| {
                                let own = backend.create_event(0, &EventOptions::new()).unwrap();
                                allowed(backend.record_event(own, from));
                                allowed(backend.stream_wait_event(to, own));
                                backend.destroy_event(own).unwrap();
                            };
                            order(first, joined);
                            if pick(3) != 0 {
                                order(joined, first);
                            }
                            if pick(4) == 0 {
                                let raw = backend.raw_stream(first).unwrap();
                                // SAFETY: The stream is alive. Asking is what a capture forbids.
                                unsafe { hip::<unsafe extern "C" fn(u64) -> i32>("hipStreamQuery")(raw) };
                            }
                            if pick(4) != 0 {
                                // SAFETY: This thread began it.
                                match unsafe { backend.end_capture(first) } {
                                    Ok(graph) => backend.destroy_graph(graph).unwrap(),
                                    Err(error) => assert_eq!(error.kind(), ErrorKind::Capture, "{error}"),
                                }
                            }
                            for stream in [joined, first] {
                                backend.destroy_stream(stream).unwrap();
                            }
                        }
                    }
                }
                // A capture of another thread that is still open refuses it.
                while backend.synchronize_device(0).is_err() {
                    std::thread::yield_now();
                }
                free(backend, block);
            });
        }
    });
    streams.into_inner().unwrap().into_iter().for_each(|stream| backend.destroy_stream(stream).unwrap());
    events.into_inner().unwrap().into_iter().for_each(|event| backend.destroy_event(event).unwrap());
    backend.synchronize_device(0).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_16_events_from_before_a_capture_are_answered_and_waited_for_during_it() {
    let Some(backend) = open("r3_16_events_from_before_a_capture_are_answered_and_waited_for_during_it") else {
        return;
    };
    let [captured, joined, other] = [(); 3].map(|()| stream(&*backend));
    let block = allocate(&*backend, 1 << 20);
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        fill(&*backend, block, 1, 1 << 20, captured);
        let first = recorded_on(&*backend, captured);
        backend.stream_wait_event(joined, first).unwrap();
        fill(&*backend, block, 2, 1 << 20, joined);
        let second = recorded_on(&*backend, joined);
        backend.begin_capture(captured, mode).unwrap();
        join(&*backend, captured, joined);
        join(&*backend, joined, captured);
        for event in [first, second] {
            backend.query_event(event).unwrap();
            let elsewhere = std::thread::scope(|scope| scope.spawn(|| backend.query_event(event)).join().unwrap());
            elsewhere.unwrap();
            backend.stream_wait_event(other, event).unwrap();
            backend.synchronize_event(event).unwrap();
        }
        fill(&*backend, block, 3, 16, other);
        assert!(backend.is_capturing(captured).unwrap() && backend.is_capturing(joined).unwrap());
        // SAFETY: This test began it.
        let graph = unsafe { backend.end_capture(captured) }.unwrap();
        backend.destroy_graph(graph).unwrap();
        let bytes = bytes_of(&*backend, block, 1 << 20, other);
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if at < 16 { 3 } else { 2 }));
        for event in [first, second] {
            assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
            backend.destroy_event(event).unwrap();
        }
    }
    free(&*backend, block);
    for stream in [captured, joined, other] {
        backend.destroy_stream(stream).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_17_an_event_of_a_threads_own_stream_outlives_the_thread() {
    let Some(backend) = open("r3_17_an_event_of_a_threads_own_stream_outlives_the_thread") else { return };
    let (block, event) = (allocate(&*backend, 1 << 20), backend.create_event(0, &EventOptions::new()).unwrap());
    let own = StreamId::per_thread_default(backend.identity().tag, 0);
    for round in 0..10 {
        std::thread::scope(|scope| {
            let record = || {
                fill(&*backend, block, round, 1 << 20, own);
                backend.record_event(event, own).unwrap();
            };
            scope.spawn(record).join().unwrap();
        });
        backend.synchronize_event(event).unwrap();
        let reader = stream(&*backend);
        assert!(bytes_of(&*backend, block, 1 << 20, reader).iter().all(|byte| *byte == round));
        backend.destroy_stream(reader).unwrap();
    }
    backend.destroy_event(event).unwrap();
    free(&*backend, block);
    nothing_is_left(&*backend);
}

#[test]
fn r3_18_an_event_of_an_ended_capture_is_complete() {
    let Some(backend) = open("r3_18_an_event_of_an_ended_capture_is_complete") else { return };
    let (captured, other) = (stream(&*backend), stream(&*backend));
    for is_lost in [false, true] {
        backend.begin_capture(captured, CaptureMode::ThreadLocal).unwrap();
        let event = recorded_on(&*backend, captured);
        if is_lost {
            lose(&*backend, captured);
        }
        // SAFETY: This test began it.
        match unsafe { backend.end_capture(captured) } {
            Ok(graph) => backend.destroy_graph(graph).unwrap(),
            Err(error) => assert!(is_lost, "{error}"),
        }
        assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
        backend.synchronize_event(event).unwrap();
        backend.stream_wait_event(other, event).unwrap();
        assert!(!backend.is_capturing(other).unwrap());
        backend.destroy_event(event).unwrap();
    }
    for stream in [captured, other] {
        backend.destroy_stream(stream).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_19_tf32_is_not_claimed() {
    const TEST: &str = "r3_19_tf32_is_not_claimed";
    // The default architecture is gfx942. According to AMD's manual, its kernels have TF32.
    let Some(backend) = open(TEST) else { return };
    assert!(backend.device_info(0).unwrap().architecture.starts_with("gfx942"));
    assert!(!backend.capabilities(0).unwrap().tf32);
    let mut handle = blas(&*backend);
    assert_eq!(handle.set_math_mode(MathMode::Tf32).unwrap_err().kind(), ErrorKind::Unsupported);
    handle.set_math_mode(MathMode::Default).unwrap();
    // hipBLAS accepts the mode, so its status does not prove that TF32 works.
    // SAFETY: The vendor's function, with its arguments, and a handle that is alive.
    unsafe {
        let set = of_library::<unsafe extern "C" fn(u64, u32) -> i32>("libhipblas.so", "hipblasSetMathMode");
        assert_eq!([1, 0].map(|mode| set(handle.raw(), mode)), [0, 0]);
    }
    handle.destroy().unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_20_interprocess_events_are_not_claimed() {
    let Some(backend) = open("r3_20_interprocess_events_are_not_claimed") else { return };
    let ipc = backend.ipc_sharing().unwrap();
    assert!(!backend.capabilities(0).unwrap().interprocess_events);
    let wanted = EventOptions::new().with_interprocess();
    assert_eq!(backend.create_event(0, &wanted).unwrap_err().kind(), ErrorKind::Unsupported);
    let handle = EventHandle::new(backend.device_info(0).unwrap().uuid, [0; 64]);
    assert_eq!(ipc.open_event(0, &handle).unwrap_err().kind(), ErrorKind::Unsupported);
    // HIP alone: HIP 7 refuses a wait for an event that was recorded 0 times or more than 32 times. HIP 6 accepts each wait and
    // does not wait.
    let stream = stream(&*backend);
    let raw = backend.raw_stream(stream).unwrap();
    let mut event = 0_u64;
    // SAFETY: The vendor's functions, with their arguments; the event and the stream are alive.
    unsafe {
        let create = hip::<unsafe extern "C" fn(*mut u64, u32) -> i32>("hipEventCreateWithFlags");
        let record = hip::<unsafe extern "C" fn(u64, u64) -> i32>("hipEventRecord");
        let wait = hip::<unsafe extern "C" fn(u64, u64, u32) -> i32>("hipStreamWaitEvent");
        let destroy = hip::<unsafe extern "C" fn(u64) -> i32>("hipEventDestroy");
        assert_eq!(create(&mut event, 6), 0);
        // An event of foreign code is not exported either.
        let foreign = backend.event_from_raw(0, event).unwrap();
        assert_eq!(ipc.export_event(foreign).unwrap_err().kind(), ErrorKind::Unsupported);
        backend.destroy_event(foreign).unwrap();
        let mut waits = vec![wait(raw, event, 0)];
        for _ in 0..40 {
            assert_eq!(record(event, raw), 0);
            waits.push(wait(raw, event, 0));
        }
        let refused = i32::from(major() >= 7);
        assert_eq!(waits[0], refused);
        assert!(waits[1..=32].iter().all(|code| *code == 0) && waits[33..].iter().all(|code| *code == refused));
        backend.synchronize_stream(stream).unwrap();
        assert_eq!(destroy(event), 0);
    }
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

/// The variable with the ticket or the payload for the importing process of a test.
const GIVEN: &str = "HIGHWATER_TEST_GIVEN";

/// Runs a test again in a process that imports, and checks that it passes.
#[track_caller]
fn import(test: &str, given: &str, settings: &[(&str, &str)]) {
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--exact", test, "--nocapture"]).env(GIVEN, given).envs(settings.iter().copied());
    let output = other.output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
}

#[test]
fn r3_21_a_handle_whose_ordinal_the_importer_does_not_see_is_refused_with_the_remedy() {
    const TEST: &str = "r3_21_a_handle_whose_ordinal_the_importer_does_not_see_is_refused_with_the_remedy";
    let Some(backend) = open(TEST) else { return };
    let runtime = Runtime::new(Arc::clone(&backend)).unwrap();
    if let Ok(ticket) = std::env::var(GIVEN) {
        // This process may see the device under another ordinal.
        let opened = runtime.open_shared::<f32>(&ticket.parse::<Ticket>().unwrap());
        if major() >= 7 && backend.device_count() == 1 {
            let error = opened.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.hint().contains("HIP_VISIBLE_DEVICES"), "{error}");
        } else {
            drop(opened.unwrap());
        }
        assert_eq!(runtime.close().unwrap().total(), 0);
        return;
    }
    let device = runtime.device(1).unwrap();
    let buffer = device.allocate_shared_by::<f32>(1000, Transport::Legacy).unwrap();
    let ticket = buffer.share().unwrap().to_string();
    import(TEST, &ticket, &[("HIP_VISIBLE_DEVICES", "1")]);
    // As the hint requires, both processes see the same devices.
    import(TEST, &ticket, &[]);
    drop((buffer, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn r3_22_memory_is_shared_beside_a_capture() {
    const TEST: &str = "r3_22_memory_is_shared_beside_a_capture";
    let Some(backend) = open(TEST) else { return };
    let (ipc, captured, uuid) =
        (backend.ipc_sharing().unwrap(), stream(&*backend), backend.device_info(0).unwrap().uuid);
    let begin = || backend.begin_capture(captured, CaptureMode::Global).unwrap();
    // SAFETY: This test began the capture.
    let end = || backend.destroy_graph(unsafe { backend.end_capture(captured) }.unwrap()).unwrap();
    if let Ok(given) = std::env::var(GIVEN) {
        let bytes = (0..64).map(|at| u8::from_str_radix(&given[2 * at..2 * at + 2], 16).unwrap());
        let payload = bytes.collect::<Vec<_>>().try_into().unwrap();
        begin();
        let opened = ipc.open_memory(0, &MemoryHandle::new(Transport::Legacy, uuid, 4096, payload)).unwrap();
        // SAFETY: Nothing uses the memory.
        unsafe { ipc.close_memory(0, opened) }.unwrap();
        end();
        backend.destroy_stream(captured).unwrap();
        nothing_is_left(&*backend);
        return;
    }
    let options = AllocateOptions::new(4096).with_kind(DeviceMemoryKind::Shareable(Transport::Legacy));
    let block = backend.allocate(0, &options).unwrap();
    begin();
    // SAFETY: The block is alive.
    let handle = unsafe { ipc.export_memory(0, block, Transport::Legacy) }.unwrap();
    end();
    let payload: String = handle.payload.iter().map(|byte| format!("{byte:02x}")).collect();
    import(TEST, &payload, &[]);
    free(&*backend, block);
    backend.destroy_stream(captured).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r3_24_a_stream_that_joins_an_invalidated_capture_is_freed_with_it() {
    let Some(backend) = open("r3_24_a_stream_that_joins_an_invalidated_capture_is_freed_with_it") else { return };
    let block = allocate(&*backend, 4096);
    let [captured, late] = [(); 2].map(|()| stream(&*backend));
    for round in 1..4 {
        backend.begin_capture(captured, CaptureMode::ThreadLocal).unwrap();
        let event = recorded_on(&*backend, captured);
        lose(&*backend, captured);
        // HIP lets the stream join a capture that can no longer succeed.
        backend.stream_wait_event(late, event).unwrap();
        assert!(backend.is_capturing(late).unwrap());
        // SAFETY: This test began it.
        let error = unsafe { backend.end_capture(captured) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Capture, "{error}");
        for stream in [late, captured] {
            assert!(!backend.is_capturing(stream).unwrap());
            fill(&*backend, block, round, 4096, stream);
            assert!(bytes_of(&*backend, block, 4096, stream).iter().all(|byte| *byte == round));
        }
        backend.destroy_event(event).unwrap();
    }
    free(&*backend, block);
    for stream in [captured, late] {
        backend.destroy_stream(stream).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_25_a_wait_in_a_capture_for_work_outside_is_refused() {
    let Some(backend) = open("r3_25_a_wait_in_a_capture_for_work_outside_is_refused") else { return };
    let [captured, joined, other, gone] = [(); 4].map(|()| stream(&*backend));
    let tag = backend.identity().tag;
    let outside = [
        recorded_on(&*backend, captured),
        recorded_on(&*backend, joined),
        recorded_on(&*backend, other),
        recorded_on(&*backend, StreamId::legacy_default(tag, 0)),
        recorded_on(&*backend, StreamId::per_thread_default(tag, 0)),
    ];
    let complete = [recorded_on(&*backend, gone), backend.create_event(0, &EventOptions::new()).unwrap()];
    backend.destroy_stream(gone).unwrap();
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        backend.begin_capture(captured, mode).unwrap();
        join(&*backend, captured, joined);
        let late = recorded_on(&*backend, other);
        for stream in [captured, joined] {
            for event in outside.into_iter().chain([late]) {
                let error = backend.stream_wait_event(stream, event).unwrap_err();
                assert_eq!((error.kind(), error.code()), (ErrorKind::Capture, None), "{error}");
                assert!(error.hint().contains("before the capture begins"), "{error}");
            }
            // The graph lacks nothing after a wait for these.
            for event in complete {
                backend.stream_wait_event(stream, event).unwrap();
            }
        }
        join(&*backend, joined, captured);
        replay(&*backend, captured);
        for event in outside.into_iter().chain([late]) {
            backend.stream_wait_event(captured, event).unwrap();
        }
        backend.destroy_event(late).unwrap();
    }
    // HIP alone: HIP accepts the wait and leaves it out of the graph.
    backend.begin_capture(captured, CaptureMode::Global).unwrap();
    let (waits, on) = (backend.raw_stream(captured).unwrap(), backend.raw_stream(other).unwrap());
    let mut event = 0_u64;
    // SAFETY: The vendor's functions, with their arguments; the event and the streams are alive.
    unsafe {
        let create = hip::<unsafe extern "C" fn(*mut u64, u32) -> i32>("hipEventCreateWithFlags");
        let record = hip::<unsafe extern "C" fn(u64, u64) -> i32>("hipEventRecord");
        let wait = hip::<unsafe extern "C" fn(u64, u64, u32) -> i32>("hipStreamWaitEvent");
        let destroy = hip::<unsafe extern "C" fn(u64) -> i32>("hipEventDestroy");
        assert_eq!([create(&mut event, 2), record(event, on), wait(waits, event, 0)], [0; 3]);
        assert_eq!(destroy(event), 0);
    }
    replay(&*backend, captured);
    outside.into_iter().chain(complete).for_each(|event| backend.destroy_event(event).unwrap());
    for stream in [captured, joined, other] {
        backend.destroy_stream(stream).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_26_a_capture_survives_an_end_by_another_thread_or_stream() {
    let Some(backend) = open("r3_26_a_capture_survives_an_end_by_another_thread_or_stream") else { return };
    let [captured, joined] = [(); 2].map(|()| stream(&*backend));
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal] {
        backend.begin_capture(captured, mode).unwrap();
        join(&*backend, captured, joined);
        // SAFETY: This test began the capture, and none of these calls ends it.
        let refused = unsafe {
            let elsewhere = std::thread::scope(|scope| scope.spawn(|| backend.end_capture(captured)).join().unwrap());
            [elsewhere.err(), backend.end_capture(joined).err()]
        };
        for error in refused {
            assert_eq!(error.unwrap().kind(), ErrorKind::Capture);
        }
        // HIP's own calls do not lose the capture either.
        // SAFETY: The vendor's function, with its arguments; the streams are alive.
        let codes = unsafe {
            let [first, other] = [captured, joined].map(|stream| backend.raw_stream(stream).unwrap());
            let end = hip::<unsafe extern "C" fn(u64, *mut u64) -> i32>("hipStreamEndCapture");
            let elsewhere = std::thread::scope(|scope| scope.spawn(|| end(first, &mut 0)).join().unwrap());
            (elsewhere, end(other, &mut 0))
        };
        assert_eq!(codes, (908, 903));
        join(&*backend, joined, captured);
        replay(&*backend, captured);
    }
    for stream in [captured, joined] {
        backend.destroy_stream(stream).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_27_the_legacy_default_stream_works_beside_the_capture_of_a_blocking_stream() {
    const TEST: &str = "r3_27_the_legacy_default_stream_works_beside_the_capture_of_a_blocking_stream";
    let Some(backend) = open(TEST) else { return };
    let block = allocate(&*backend, 4096);
    let legacy = StreamId::legacy_default(backend.identity().tag, 0);
    let mut blocking = 0_u64;
    // SAFETY: The vendor's functions, with their arguments; the stream is alive, and the block has the bytes.
    unsafe {
        let create = hip::<unsafe extern "C" fn(*mut u64, u32) -> i32>("hipStreamCreateWithFlags");
        let begin = hip::<unsafe extern "C" fn(u64, u32) -> i32>("hipStreamBeginCapture");
        let end = hip::<unsafe extern "C" fn(u64, *mut u64) -> i32>("hipStreamEndCapture");
        let copy = hip::<unsafe extern "C" fn(u64, u64, usize, i32) -> i32>("hipMemcpy");
        let destroy = hip::<unsafe extern "C" fn(u64) -> i32>("hipStreamDestroy");
        let forget = hip::<unsafe extern "C" fn(u64) -> i32>("hipGraphDestroy");
        assert_eq!(create(&mut blocking, 0), 0);
        assert_eq!(begin(blocking, 0), 0);
        fill(&*backend, block, 7, 4096, legacy);
        let event = recorded_on(&*backend, legacy);
        backend.synchronize_event(event).unwrap();
        assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
        backend.destroy_event(event).unwrap();
        let mut graph = 0;
        assert_eq!(end(blocking, &mut graph), 0);
        assert_eq!(forget(graph), 0);
        // Synchronous calls lose the capture. The backend makes none.
        assert_eq!(
            [begin(blocking, 0), copy(block.get(), block.get(), 16, 3), end(blocking, &mut graph)],
            [0, 906, 901]
        );
        assert_eq!(destroy(blocking), 0);
    }
    let reader = stream(&*backend);
    assert!(bytes_of(&*backend, block, 4096, reader).iter().all(|byte| *byte == 7));
    backend.destroy_stream(reader).unwrap();
    free(&*backend, block);
    nothing_is_left(&*backend);
}

#[test]
fn r3_28_events_outside_are_queried_beside_a_capture_of_the_global_mode() {
    const TEST: &str = "r3_28_events_outside_are_queried_beside_a_capture_of_the_global_mode";
    let Some(backend) = open(TEST) else { return };
    let [captured, other] = [(); 2].map(|()| stream(&*backend));
    let event = recorded_on(&*backend, other);
    backend.begin_capture(captured, CaptureMode::Global).unwrap();
    let ask = || {
        backend.query_event(event).unwrap();
        backend.synchronize_event(event).unwrap();
    };
    ask();
    std::thread::scope(|scope| scope.spawn(ask).join().unwrap());
    replay(&*backend, captured);
    // HIP alone: HIP 7 refuses the query and loses the capture.
    backend.begin_capture(captured, CaptureMode::Global).unwrap();
    let on = backend.raw_stream(other).unwrap();
    let mut raw = 0_u64;
    // SAFETY: The vendor's functions, with their arguments; the event and the stream are alive.
    unsafe {
        let create = hip::<unsafe extern "C" fn(*mut u64, u32) -> i32>("hipEventCreateWithFlags");
        let record = hip::<unsafe extern "C" fn(u64, u64) -> i32>("hipEventRecord");
        let query = hip::<unsafe extern "C" fn(u64) -> i32>("hipEventQuery");
        let destroy = hip::<unsafe extern "C" fn(u64) -> i32>("hipEventDestroy");
        assert_eq!([create(&mut raw, 2), record(raw, on)], [0; 2]);
        assert_eq!(query(raw) == 900, major() >= 7);
        match backend.end_capture(captured) {
            Ok(graph) => backend.destroy_graph(graph).unwrap(),
            Err(error) => assert!(major() >= 7, "{error}"),
        }
        backend.synchronize_stream(other).unwrap();
        assert_eq!(destroy(raw), 0);
    }
    backend.destroy_event(event).unwrap();
    for stream in [captured, other] {
        backend.destroy_stream(stream).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn r3_29_processes_agree_on_devices_without_serial_numbers() {
    const TEST: &str = "r3_29_processes_agree_on_devices_without_serial_numbers";
    if !inside_with(TEST, &[("HIGHWATER_SIMULATED_HIP", "serial=none")]) {
        return;
    }
    let backend = highwater_rocm::open().unwrap();
    let uuid_of = |device| format!("{:02x?}", backend.device_info(device).unwrap().uuid);
    if let Ok(expected) = std::env::var(GIVEN) {
        assert_eq!((backend.device_count(), uuid_of(0)), (1, expected));
        return;
    }
    let uuids = [0, 1].map(uuid_of);
    assert_ne!(uuids[0], uuids[1]);
    // No UUID begins with "XX", which HIP reports.
    assert!(uuids.iter().all(|uuid| !uuid.starts_with("[58, 58, 00")));
    for (device, uuid) in ["0", "1"].into_iter().zip(&uuids) {
        import(TEST, uuid, &[("HIP_VISIBLE_DEVICES", device)]);
    }
}

#[test]
fn b6_1_page_locked_memory_is_cached_by_the_device() {
    let Some(backend) = open("b6_1_page_locked_memory_is_cached_by_the_device") else { return };
    assert!(backend.capabilities(0).unwrap().pinned_cached_by_device);
    // Non-coherent, portable and mapped; and write-combined.
    assert_eq!(flags_of(&*backend, HostMemoryKind::Default) & 0x8000_0007, 0x8000_0003);
    assert_eq!(flags_of(&*backend, HostMemoryKind::WriteCombined) & 0x7, 0x7);
}

/// Returns the flags with which the runtime allocated page-locked memory of a kind.
fn flags_of(backend: &dyn Backend, kind: HostMemoryKind) -> u32 {
    let host = backend.host_allocator();
    let block = host.allocate(4096, &HostOptions::new().with_kind(kind)).unwrap();
    let mut flags = 0;
    // SAFETY: The block is page-locked, and the call writes one number, which outlives it.
    let code =
        unsafe { hip::<unsafe extern "C" fn(*mut u32, *mut u8) -> i32>("hipHostGetFlags")(&mut flags, block.as_ptr()) };
    assert_eq!(code, 0);
    // SAFETY: Nothing uses it.
    unsafe { host.free(block) }.unwrap();
    flags
}

#[test]
fn b6_2_the_flag_for_a_node_is_not_relied_on() {
    let Some(backend) = open("b6_2_the_flag_for_a_node_is_not_relied_on") else { return };
    for kind in [HostMemoryKind::Default, HostMemoryKind::WriteCombined] {
        assert_eq!(flags_of(&*backend, kind) & 0x2000_0000, 0, "{kind:?}");
    }
}

#[test]
fn b6_3_the_device_is_given_its_own_address_of_registered_memory() {
    let Some(backend) = open("b6_3_the_device_is_given_its_own_address_of_registered_memory") else { return };
    assert!(!backend.capabilities(0).unwrap().host_address_is_device_address);
    let (host, stream) = (backend.host_allocator(), stream(&*backend));
    let (_memory, start) = pages(2);
    // SAFETY: The memory stays mapped until it is unregistered, and the fill is waited for.
    unsafe {
        host.register(start, 2 * 4096, &HostOptions::new()).unwrap();
        let mut expected = 0;
        let address_of = hip::<unsafe extern "C" fn(*mut u64, *mut u8, u32) -> i32>("hipHostGetDevicePointer");
        assert_eq!(address_of(&mut expected, start.as_ptr(), 0), 0);
        assert_eq!(host.device_address(start, 0).unwrap().get(), expected);
        assert_eq!(host.device_address(with_offset(start, 5000), 0).unwrap().get(), expected + 5000);
        // A copy takes the host's address.
        let block = allocate(&*backend, 4096);
        fill(&*backend, block, 8, 4096, stream);
        let from = Location::Device { device: 0, ptr: block };
        backend.copy(&MemoryCopy::new(Location::Host(with_offset(start, 4096)), from, 4096), stream).unwrap();
        backend.synchronize_stream(stream).unwrap();
        assert!(std::slice::from_raw_parts(start.as_ptr().add(4096), 4096).iter().all(|byte| *byte == 8));
        host.unregister(start).unwrap();
        free(&*backend, block);
    }
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn b6_4_flags_of_page_locked_memory_are_the_ones_passed() {
    let Some(backend) = open("b6_4_flags_of_page_locked_memory_are_the_ones_passed") else { return };
    let kinds = [HostMemoryKind::Default, HostMemoryKind::WriteCombined];
    assert_eq!(kinds.map(|kind| flags_of(&*backend, kind)), [0x8000_0003, 7]);
    // Registered memory has no flags, so the backend's table stores the kind of each address.
    let (host, (_memory, start)) = (backend.host_allocator(), pages(1));
    // SAFETY: The memory stays mapped until it is unregistered, and the call writes one number, if anything.
    unsafe {
        host.register(start, 4096, &HostOptions::new()).unwrap();
        let mut flags = 9;
        let told = hip::<unsafe extern "C" fn(*mut u32, *mut u8) -> i32>("hipHostGetFlags")(&mut flags, start.as_ptr());
        assert_eq!((told, flags), (1, 9));
        host.unregister(start).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn b6_5_memory_is_registered_with_flags_that_every_version_accepts() {
    let Some(backend) = open("b6_5_memory_is_registered_with_flags_that_every_version_accepts") else { return };
    let (host, (_memory, start)) = (backend.host_allocator(), pages(1));
    // SAFETY: The memory stays mapped until it is unregistered.
    unsafe {
        let register = hip::<unsafe extern "C" fn(*mut u8, usize, u32) -> i32>("hipHostRegister");
        let unregister = hip::<unsafe extern "C" fn(*mut u8) -> i32>("hipHostUnregister");
        let code = register(start.as_ptr(), 4096, 0x8000_0000);
        assert_eq!(code, i32::from(major() < 7));
        if code == 0 {
            assert_eq!(unregister(start.as_ptr()), 0);
        }
        host.register(start, 4096, &HostOptions::new()).unwrap();
        host.unregister(start).unwrap();
    }
    nothing_is_left(&*backend);
}

#[test]
fn atomics_start_as_not_allowed_and_workspaces_are_there_where_hipblas_has_them() {
    const TEST: &str = "atomics_start_as_not_allowed_and_workspaces_are_there_where_hipblas_has_them";
    let Some(backend) = open(TEST) else { return };
    let mut handle = blas(&*backend);
    // SAFETY: The vendor's function, with its arguments.
    let ask =
        unsafe { of_library::<unsafe extern "C" fn(u64, *mut u32) -> i32>("libhipblas.so", "hipblasGetAtomicsMode") };
    let mut mode = 9;
    // SAFETY: The handle is alive, and the number lives until the call returns.
    assert_eq!((unsafe { ask(handle.raw(), &mut mode) }, mode), (0, 0));
    handle.set_atomics_mode(AtomicsMode::Allowed).unwrap();
    // SAFETY: As above.
    assert_eq!((unsafe { ask(handle.raw(), &mut mode) }, mode), (0, 1));
    let can = backend.capabilities(0).unwrap();
    assert_eq!(can.blas_workspace, major() >= 7);
    let stream = stream(&*backend);
    handle.set_stream(stream).unwrap();
    let ptr = allocate(&*backend, 1 << 20);
    // SAFETY: The block outlives the handle's use of it.
    unsafe {
        let set = handle.set_workspace(Some(Workspace { ptr, bytes: 1 << 20 }));
        match can.blas_workspace {
            true => set.unwrap(),
            false => assert_eq!(set.unwrap_err().kind(), ErrorKind::Unsupported),
        }
        handle.set_workspace(None).unwrap();
    }
    handle.destroy().unwrap();
    free(&*backend, ptr);
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn a_child_that_opens_the_backend_again_is_told_of_the_fork() {
    let Some(backend) = open("a_child_that_opens_the_backend_again_is_told_of_the_fork") else { return };
    // SAFETY: The child calls the backend, which takes no lock in a child, and ends with `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let opened = highwater_rocm::open().err().map(|unavailable| unavailable.error.kind());
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
    assert!(highwater_rocm::open().is_ok());
}

#[test]
fn the_device_of_the_caller_is_current_again_after_each_call() {
    let Some(backend) = open("the_device_of_the_caller_is_current_again_after_each_call") else { return };
    if backend.device_count() < 2 {
        return;
    }
    // SAFETY: The symbols have these arguments.
    let (set, get) = unsafe {
        (
            hip::<unsafe extern "C" fn(i32) -> i32>("hipSetDevice"),
            hip::<unsafe extern "C" fn(*mut i32) -> i32>("hipGetDevice"),
        )
    };
    for current in [0, 1] {
        // SAFETY: The call takes a number.
        assert_eq!(unsafe { set(current) }, 0);
        for device in [0, 1] {
            let stream = backend.create_stream(device, &StreamOptions::new()).unwrap();
            let legacy = StreamId::legacy_default(backend.identity().tag, device);
            let block = backend.allocate(device, &AllocateOptions::new(64)).unwrap();
            for stream in [stream, legacy] {
                // SAFETY: The range lies inside the block, which lives until the stream was waited for.
                unsafe { backend.fill(&MemoryFill::new(device, block, FillPattern::U32(5), 16), stream) }.unwrap();
                backend.synchronize_stream(stream).unwrap();
            }
            backend.create_blas_handle(device, &BlasOptions::new(BlasKind::Blas)).unwrap().destroy().unwrap();
            // SAFETY: Nothing uses it.
            unsafe { backend.free(device, block, None) }.unwrap();
            // A foreign stream belongs to the device on which it was created.
            let raw = backend.raw_stream(stream).unwrap();
            // SAFETY: The stream is alive.
            let other = unsafe { backend.stream_from_raw(1 - device, raw) }.unwrap_err();
            assert_eq!(other.kind(), ErrorKind::WrongDevice, "{other}");
            backend.destroy_stream(stream).unwrap();
            let mut seen = -1;
            // SAFETY: The call writes one number, which outlives it.
            assert_eq!((unsafe { get(&mut seen) }, seen), (0, current));
        }
    }
    nothing_is_left(&*backend);
}

/// The codes are those of AMD's manual, and were not seen on a device.
#[test]
fn rows_are_copied_in_one_call_and_their_pitches_are_checked() {
    let Some(backend) = open("rows_are_copied_in_one_call_and_their_pitches_are_checked") else { return };
    let stream = stream(&*backend);
    let (block, other) = (allocate(&*backend, 4096), allocate(&*backend, 4096));
    let pinned = backend.host_allocator().allocate(4096, &HostOptions::new()).unwrap();
    let on = |ptr| Location::Device { device: 0, ptr };
    fill(&*backend, block, 3, 4096, stream);
    fill(&*backend, other, 1, 4096, stream);
    let shape = CopyShape::new(16, 60).with_src_pitch(64).with_dst_pitch(40);
    let back = shape.with_src_pitch(40).with_dst_pitch(64);
    // SAFETY: The rows lie inside the blocks, which live until the stream was waited for.
    unsafe {
        backend.copy_2d(&MemoryCopy2d::new(Location::Host(pinned), on(block), shape), stream).unwrap();
        fill(&*backend, block, 0, 4096, stream);
        backend.copy_2d(&MemoryCopy2d::new(on(block), Location::Host(pinned), back), stream).unwrap();
        backend.copy_2d(&MemoryCopy2d::new(on(other), on(block), shape), stream).unwrap();
    }
    for (byte, seen) in bytes_of(&*backend, other, 4096, stream).into_iter().enumerate() {
        let is_copied = byte < 60 * 40 && byte % 40 < 16;
        assert_eq!(seen, if is_copied { 3 } else { 1 }, "byte {byte}");
    }
    type Copy2d = unsafe extern "C" fn(u64, usize, u64, usize, usize, usize, u32, u64) -> i32;
    // SAFETY: The symbol has these arguments.
    let copy = unsafe { hip::<Copy2d>("hipMemcpy2DAsync") };
    let raw = backend.raw_stream(stream).unwrap();
    for (pitches, kind, code) in [((16, 15), 3, 12), ((15, 16), 3, 12), ((16, 16), 5, 21), ((16, 16), 3, 0)] {
        // SAFETY: The rows lie inside the blocks, which live until the stream was waited for.
        let answer = unsafe { copy(block.get(), pitches.0, other.get(), pitches.1, 16, 4, kind, raw) };
        assert_eq!(answer, code, "pitches {pitches:?}, kind {kind}");
    }
    backend.synchronize_stream(stream).unwrap();
    // SAFETY: Nothing uses it any more.
    unsafe { backend.host_allocator().free(pinned) }.unwrap();
    free(&*backend, block);
    free(&*backend, other);
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn devices_have_uuids_of_their_own_and_copies_go_between_them() {
    let Some(backend) = open("devices_have_uuids_of_their_own_and_copies_go_between_them") else { return };
    let infos: Vec<_> = (0..backend.device_count()).map(|device| backend.device_info(device).unwrap()).collect();
    for info in &infos {
        assert_ne!(info.uuid, [0; 16]);
        assert_eq!(infos.iter().filter(|other| other.uuid == info.uuid).count(), 1, "{infos:?}");
    }
    if infos.len() < 2 {
        return;
    }
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    let near = allocate(&*backend, 4096);
    let far = backend.allocate(1, &AllocateOptions::new(4096)).unwrap();
    fill(&*backend, near, 3, 4096, stream);
    let places = [Location::Device { device: 0, ptr: near }, Location::Device { device: 1, ptr: far }];
    // SAFETY: Both blocks live until the stream was waited for.
    unsafe {
        backend.copy(&MemoryCopy::new(places[1], places[0], 4096), stream).unwrap();
        fill(&*backend, near, 0, 4096, stream);
        backend.copy(&MemoryCopy::new(places[0], places[1], 4096), stream).unwrap();
    }
    assert!(bytes_of(&*backend, near, 4096, stream).iter().all(|byte| *byte == 3));
    free(&*backend, near);
    // SAFETY: Nothing uses it any more.
    unsafe { backend.free(1, far, None) }.unwrap();
    backend.destroy_stream(stream).unwrap();
    nothing_is_left(&*backend);
}

/// Runs a product by a plan, with a bias and ReLU, on two streams in turn.
fn plans_on_two_streams(runtime: &Runtime) {
    let device = runtime.device(0).unwrap();
    let streams = [device.create_stream().unwrap(), device.create_stream().unwrap()];
    let a = streams[0].upload(&[1.0_f32, 2.0, 3.0, 4.0]).unwrap();
    let (b, bias) =
        (streams[0].upload(&[1.0_f32, 0.0, 0.0, -1.0]).unwrap(), streams[0].upload(&[0.5_f32, 0.0]).unwrap());
    let c = streams[0].upload(&[0.0_f32; 4]).unwrap();
    streams[0].synchronize().unwrap();
    for round in 0..6 {
        let stream = &streams[round % 2];
        let mut lease = stream.lt().unwrap();
        let shape = GemmShape::of::<f32>(2, 2, 2);
        lease.matmul(&shape, Epilogue::BiasRelu, 1.0, &a, &b, 0.0, &c, Some((&bias).into())).unwrap();
        drop(lease);
        assert_eq!(stream.download(&c).unwrap(), [1.5, 2.0, 0.0, 0.0]);
    }
}

#[test]
fn r4_1_a_handle_of_hipblaslt_stays_with_its_stream() {
    let Some(backend) = open("r4_1_a_handle_of_hipblaslt_stays_with_its_stream") else { return };
    let capabilities = backend.capabilities(0).unwrap();
    assert!(capabilities.lt_plans && capabilities.lt_handle_per_stream);
    // The simulated library ends the process if one handle serves two streams.
    let runtime = Runtime::new(backend).unwrap();
    plans_on_two_streams(&runtime);
    // Handles that are made for streams to come are counted.
    let counted = || {
        let handles = runtime.statistics().lt_handles;
        [handles.created, handles.live, handles.warmed]
    };
    let [created, live, warmed] = counted();
    let device = runtime.device(0).unwrap();
    let idle = runtime.statistics().lt_handles.idle as usize;
    device.warm_lt(idle + 3).unwrap();
    let [created_now, live_now, warmed_now] = counted();
    assert_eq!(live_now - live, warmed_now - warmed);
    assert!(created_now - created == warmed_now - warmed && warmed_now > warmed, "{warmed} {warmed_now}");
    // A stream that takes one creates none.
    drop(device.create_stream().unwrap().lt().unwrap());
    assert_eq!(counted()[0], created_now);
}

/// Checks that everything but plans works without hipBLASLt, and that the identity says so.
fn works_without_lt(test: &str, variants: &[&str], reason: &str) {
    if isolated::version().is_none() {
        return isolated::outside(test, variants, &[], None);
    }
    let backend = highwater_rocm::open().unwrap();
    let told = &backend.identity().versions.iter().find(|(what, _)| what == "hipBLASLt").unwrap().1;
    assert!(told.starts_with("none, so there are no Lt plans") && told.contains(reason), "{told}");
    assert!(!backend.capabilities(0).unwrap().lt_plans);
    let error = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Lt)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    product(&*backend, DataType::F32, DataType::F32, false, MathMode::Default);
    nothing_is_left(&*backend);
}

#[test]
fn r4_2_without_hipblaslt_everything_but_plans_works() {
    let test = "r4_2_without_hipblaslt_everything_but_plans_works";
    works_without_lt(test, &["rocm:no-hipblaslt", "rocm6:no-hipblaslt"], "libhipblaslt.so");
}

#[test]
fn r4_2_a_hipblaslt_that_lacks_a_call_is_as_none() {
    let test = "r4_2_a_hipblaslt_that_lacks_a_call_is_as_none";
    works_without_lt(test, &["rocm:old-lt", "rocm6:old-lt"], "hipblasLtMatmulAlgoGetHeuristic");
}

#[test]
fn r4_3_a_product_without_an_algorithm_is_refused_by_name() {
    const TEST: &str = "r4_3_a_product_without_an_algorithm_is_refused_by_name";
    if isolated::version().is_none() {
        return isolated::outside(TEST, &["rocm:empty-lt", "rocm6:empty-lt"], &[], None);
    }
    let backend = highwater_rocm::open().unwrap();
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Lt)).unwrap();
    let options = PlanOptions::new(GemmShape::new(DataType::F32, 8, 8, 8), Epilogue::None, 0);
    let error = handle.create_plan(&options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.message().contains("hipBLASLt has no kernel"), "{error}");
    handle.destroy().unwrap();
    nothing_is_left(&*backend);
}

#[test]
fn r4_4_the_size_of_lt_workspaces_follows_amds_variable() {
    const TEST: &str = "r4_4_the_size_of_lt_workspaces_follows_amds_variable";
    if !inside_with(TEST, &[("HIPBLASLT_WORKSPACE_SIZE", "4096")]) {
        return;
    }
    let backend = highwater_rocm::open().unwrap();
    let default = backend.capabilities(0).unwrap().lt_workspace_bytes;
    let runtime = Runtime::new(backend).unwrap();
    plans_on_two_streams(&runtime);
    // The number counts units of 1024 bytes. hipBLAS 2 gives no handle a workspace.
    let expected = if major() == 6 { 0 } else { 2 * (4096 << 10) };
    assert_eq!((runtime.statistics().workspace_bytes, default), (expected, 80 << 20));
}

#[test]
fn r4_5_a_handle_for_plans_is_refused_before_hipblaslt_ends_the_process() {
    const TEST: &str = "r4_5_a_handle_for_plans_is_refused_before_hipblaslt_ends_the_process";
    let Some(backend) = open(TEST) else { return };
    let make = || backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Lt));
    // A handle holds device memory.
    let before = backend.memory_info(0).unwrap().free;
    let mut handle = make().unwrap();
    assert!(backend.memory_info(0).unwrap().free <= before - (25 << 20));
    handle.destroy().unwrap();
    let mut blocks = Vec::new();
    for bytes in [1 << 30, 16 << 20] {
        while let Ok(block) = backend.allocate(0, &AllocateOptions::new(bytes)) {
            blocks.push(block);
        }
    }
    let error = make().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    assert!(error.message().contains("expected at least 52428800"), "{error}");
    if std::env::var_os(GIVEN).is_some() {
        let mut raw = 0_u64;
        // SAFETY: The vendor's function, with its argument.
        unsafe { of_library::<unsafe extern "C" fn(*mut u64) -> i32>("libhipblaslt.so", "hipblasLtCreate")(&mut raw) };
        return;
    }
    // HIP alone: the library ends a process that skips the check.
    let mut other = Command::new(std::env::current_exe().unwrap());
    let output = other.args(["--exact", TEST, "--nocapture"]).env(GIVEN, "1").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Hip error: 'out of memory'"));
    for block in blocks {
        free(&*backend, block);
    }
    make().unwrap().destroy().unwrap();
    nothing_is_left(&*backend);
}

/// Runs products on two streams in turn, from one thread, without a wait in between. Returns the number of wrong ones.
fn wrong_products_on_two_streams(runtime: &Runtime) -> usize {
    const SIZE: usize = 48;
    const ROUNDS: usize = 40;
    let device = runtime.device(0).unwrap();
    let streams = [device.create_stream().unwrap(), device.create_stream().unwrap()];
    let shape = GemmShape::of::<f32>(SIZE, SIZE, SIZE);
    let ones = vec![1.0_f32; SIZE * SIZE];
    let factors: Vec<_> = (0..2).map(|i| streams[i].upload(&vec![i as f32 + 1.0; SIZE * SIZE]).unwrap()).collect();
    let b = streams[0].upload(&ones).unwrap();
    let products: Vec<_> = (0..2 * ROUNDS).map(|_| device.allocate::<f32>(SIZE * SIZE).unwrap()).collect();
    streams[0].synchronize().unwrap();
    for (i, c) in products.iter().enumerate() {
        streams[i % 2].blas().unwrap().gemm(&shape, 1.0, &factors[i % 2], &b, 0.0, c).unwrap();
    }
    let is_wrong = |(i, c): (usize, &_)| {
        let expected = (i % 2 + 1) as f32 * SIZE as f32;
        streams[i % 2].download(c).unwrap().iter().any(|value| *value != expected)
    };
    products.iter().enumerate().filter(|product| is_wrong(*product)).count()
}

#[test]
fn a_handle_that_takes_no_workspace_stays_with_its_stream_and_out_of_captures() {
    let test = "a_handle_that_takes_no_workspace_stays_with_its_stream_and_out_of_captures";
    let Some(backend) = open(test) else { return };
    let capabilities = backend.capabilities(0).unwrap();
    assert_eq!((capabilities.blas_workspace, capabilities.handle_per_stream), (major() > 6, major() == 6));
    let runtime = Runtime::new(backend).unwrap();
    assert_eq!(wrong_products_on_two_streams(&runtime), 0);
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let (a, c) = (stream.upload(&[2.0_f32; 4]).unwrap(), stream.upload(&[0.0_f32; 4]).unwrap());
    if major() == 7 {
        // A capture creates no handle. With HIP 6, none is needed, because no product is captured.
        drop(stream.blas().unwrap());
    }
    let mut recorded = Ok(());
    let graph = stream.capture(|scope| {
        recorded = scope.blas().and_then(|mut blas| blas.gemm(&GemmShape::of::<f32>(2, 2, 2), 1.0, &a, &a, 0.0, &c));
        scope.fill(&a, 3.0_f32)
    });
    let mut graph = graph.unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&a).unwrap(), [3.0; 4]);
    if major() == 6 {
        let error = recorded.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(stream.download(&c).unwrap(), [0.0; 4]);
    } else {
        recorded.unwrap();
        assert_eq!(stream.download(&c).unwrap(), [8.0; 4]);
    }
}

type SetMode = unsafe extern "C" fn(u64, u32) -> i32;
type GetStream = unsafe extern "C" fn(u64, *mut u64) -> i32;

#[test]
fn settings_of_foreign_code_do_not_stay_on_a_handle() {
    let Some(backend) = open("settings_of_foreign_code_do_not_stay_on_a_handle") else { return };
    let runtime = Runtime::new(backend).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let (a, c) = (stream.upload(&[2.0_f32; 4]).unwrap(), stream.upload(&[0.0_f32; 4]).unwrap());
    let shape = GemmShape::of::<f32>(2, 2, 2);
    for set in ["hipblasSetPointerMode", "hipblasSetAtomicsMode"] {
        // SAFETY: The vendor's function, with its arguments.
        let set = unsafe { of_library::<SetMode>("libhipblas.so", set) };
        let mut lease = stream.blas().unwrap();
        // SAFETY: The handle is lent for the call.
        lease.with_raw(|raw| assert_eq!(unsafe { set(raw.handle, 1) }, 0)).unwrap();
        lease.gemm(&shape, 1.0, &a, &a, 0.0, &c).unwrap();
        assert_eq!(stream.download(&c).unwrap(), [8.0; 4]);
    }
    assert_eq!(runtime.statistics().blas_handles.created, 1);
}

#[test]
fn a_spare_handle_is_bound_to_no_stream_that_has_ended() {
    let Some(backend) = open("a_spare_handle_is_bound_to_no_stream_that_has_ended") else { return };
    let is_per_stream = backend.capabilities(0).unwrap().handle_per_stream;
    let runtime = Runtime::new(backend).unwrap();
    let device = runtime.device(0).unwrap();
    // SAFETY: The vendor's function, with its arguments.
    let get_stream = unsafe { of_library::<GetStream>("libhipblas.so", "hipblasGetStream") };
    let bound = |handle| {
        let mut stream = u64::MAX;
        // SAFETY: The handle lives in the pool, or as a spare one; the number lives until the call returns.
        assert_eq!(unsafe { get_stream(handle, &mut stream) }, 0);
        stream
    };
    let stream = device.create_stream().unwrap();
    let handle = stream.blas().unwrap().with_raw(|raw| raw.handle).unwrap();
    assert_ne!(bound(handle), 0);
    drop(stream);
    if is_per_stream {
        assert_eq!(bound(handle), 0, "the default stream, which does not end");
        device.synchronize().unwrap();
        let next = device.create_stream().unwrap();
        assert_eq!(next.blas().unwrap().with_raw(|raw| raw.handle).unwrap(), handle);
    }
}

#[test]
fn hips_default_streams_are_wrapped_by_their_handles() {
    let Some(backend) = open("hips_default_streams_are_wrapped_by_their_handles") else { return };
    let runtime = Runtime::new(backend).unwrap();
    let device = runtime.device(0).unwrap();
    // SAFETY: Default streams never end.
    let wrap = |handle| unsafe { device.stream_from_raw(handle) };
    for (handle, is_legacy) in [(0, true), (2, false)] {
        let stream = wrap(handle).unwrap();
        assert_eq!((stream.id().is_legacy_default(), stream.id().is_per_thread_default()), (is_legacy, !is_legacy));
        let block = stream.upload(&[7_u8; 1024]).unwrap();
        assert_eq!(stream.download(&block).unwrap(), [7; 1024]);
    }
    // Newer versions also call it the legacy default stream.
    let refused = wrap(1).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.hint().contains("legacy_default"), "{refused}");
    drop(device);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn memory_of_other_code_is_described_by_attempts() {
    let Some(backend) = open("memory_of_other_code_is_described_by_attempts") else { return };
    // SAFETY: The symbols have these arguments, here and below.
    let malloc = unsafe { hip::<unsafe extern "C" fn(*mut u64, usize) -> i32>("hipMalloc") };
    // SAFETY: As above.
    let malloc_managed = unsafe { hip::<unsafe extern "C" fn(*mut u64, usize, u32) -> i32>("hipMallocManaged") };
    // SAFETY: As above.
    let malloc_async = unsafe { hip::<unsafe extern "C" fn(*mut u64, usize, u64) -> i32>("hipMallocAsync") };
    // SAFETY: As above.
    let free_raw = unsafe { hip::<unsafe extern "C" fn(u64) -> i32>("hipFree") };
    let (mut plain, mut managed, mut ordered) = (0, 0, 0);
    // SAFETY: The calls write one number each, which outlives them.
    unsafe {
        assert_eq!(malloc(&mut plain, 1 << 20), 0);
        assert_eq!(malloc_managed(&mut managed, 4096, 1), 0);
        assert_eq!(malloc_async(&mut ordered, 4096, 0), 0);
    }
    let describe = |address: u64| backend.describe_memory(0, DevicePtr::new(address));
    let range = describe(plain + 4096).unwrap();
    assert_eq!((range.kind, range.base, range.bytes), (RangeKind::Plain, DevicePtr::new(plain), 1 << 20));
    assert!(range.transports.contains(Transport::Legacy));
    let ipc = backend.ipc_sharing().unwrap();
    // SAFETY: The block is alive.
    let handle = unsafe { ipc.export_memory(0, range.base, Transport::Legacy) }.unwrap();
    assert_eq!(handle.bytes, 1 << 20);
    // SAFETY: The call must be refused.
    let inside = unsafe { ipc.export_memory(0, range.base.offset(4096), Transport::Legacy) };
    assert_eq!(inside.unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(describe(managed).unwrap().kind, RangeKind::Managed);
    // HIP does not say that a pool owns it; no handle names it.
    assert!(describe(ordered).unwrap().transports.is_empty());
    let host = backend.host_allocator().allocate(4096, &HostOptions::new()).unwrap();
    assert_eq!(describe(host.address() as u64).unwrap_err().kind(), ErrorKind::InvalidPointer);
    assert_eq!(describe(64).unwrap_err().kind(), ErrorKind::InvalidPointer);
    // SAFETY: Nothing uses them.
    unsafe {
        backend.host_allocator().free(host).unwrap();
        for address in [plain, managed, ordered] {
            assert_eq!(free_raw(address), 0);
        }
    }
    nothing_is_left(&*backend);
}

#[test]
fn memory_of_other_code_is_opened_by_another_process() {
    const TEST: &str = "memory_of_other_code_is_opened_by_another_process";
    const TICKET: &str = "HIGHWATER_TEST_ADOPTED_TICKET";
    let Some(backend) = open(TEST) else { return };
    let runtime = Runtime::new(backend).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    if let Ok(ticket) = std::env::var(TICKET) {
        let opened = runtime.open_shared::<f32>(&ticket.parse::<Ticket>().unwrap()).unwrap();
        assert_eq!(stream.download(&opened).unwrap(), vec![1.5; 1000]);
        stream.fill(&opened, 2.5_f32).unwrap();
        stream.synchronize().unwrap();
        drop((opened, stream, device));
        assert_eq!(runtime.close().unwrap().total(), 0);
        return;
    }
    // SAFETY: The symbol has these arguments, here and below.
    let malloc = unsafe { hip::<unsafe extern "C" fn(*mut u64, usize) -> i32>("hipMalloc") };
    // SAFETY: As above.
    let malloc_async = unsafe { hip::<unsafe extern "C" fn(*mut u64, usize, u64) -> i32>("hipMallocAsync") };
    // SAFETY: As above.
    let free_raw = unsafe { hip::<unsafe extern "C" fn(u64) -> i32>("hipFree") };
    let (mut block, mut ordered) = (0, 0);
    // SAFETY: The calls write one number each, which outlives them.
    unsafe {
        assert_eq!(malloc(&mut block, 1 << 20), 0);
        assert_eq!(malloc_async(&mut ordered, 4096, 0), 0);
    }
    // SAFETY: The test frees the memory at its end, and nothing else uses it.
    let adopt = |address: u64, bytes| unsafe { device.adopt::<f32>(DevicePtr::new(address), bytes, ()) }.unwrap();
    let buffer = adopt(block + 65_536, 4000);
    assert_eq!(buffer.transport().unwrap(), Transport::Legacy);
    stream.fill(&buffer, 1.5_f32).unwrap();
    let ticket = buffer.share().unwrap();
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--exact", TEST, "--test-threads=1"]).env(TICKET, ticket.to_string());
    let output = other.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    assert_eq!(stream.download(&buffer).unwrap(), vec![2.5; 1000]);
    // Memory of a pool works in this process, and no handle names it.
    let pooled = adopt(ordered, 4096);
    stream.fill(&pooled, 3.5_f32).unwrap();
    assert_eq!(stream.download(&pooled).unwrap(), vec![3.5; 1024]);
    let error = pooled.share().map(drop).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("no transport"), "{error}");
    drop((buffer, pooled, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
    // SAFETY: Nothing uses them.
    assert_eq!(unsafe { (free_raw(block), free_raw(ordered)) }, (0, 0));
}
