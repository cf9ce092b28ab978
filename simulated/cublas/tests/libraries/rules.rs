//! The rules of cuBLAS as a real one was seen to have them.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use highwater_simulated_harness::library::text_of;
use highwater_simulated_harness::values::{F16, F32, F64, diagonal_of, is_diagonal};
use highwater_simulated_harness::{Shared, code, isolated, ok};

use crate::rig::{Blas, Driver, Lt, allocate, download, gate_on, handle, start, store, stream, upload};

/// Edge of the matrices below, whose product needs more than the least workspace.
const EDGE: usize = 80;
const WORKSPACE: usize = 1 << 16;

/// Enqueues `C = A * B` of square matrices.
fn square(handle: *mut c_void, a: u64, b: u64, c: u64) -> u32 {
    let (one, zero, edge) = (1f32, 0f32, EDGE as i32);
    code!(Blas.cublasSgemm_v2(handle, 0, 0, edge, edge, edge, &one, a, edge, b, edge, &zero, c, edge))
}

/// A square matrix that is `value` on its diagonal.
fn diagonal(value: f32, stream: *mut c_void) -> u64 {
    upload(&diagonal_of(EDGE, value), stream)
}

fn is_square(c: u64, value: f32, stream: *mut c_void) -> bool {
    is_diagonal(&download(c, EDGE * EDGE, stream), EDGE, value)
}

isolated! {
    fn versions_names_and_properties_need_no_handle_and_no_device(_) over ["cuda:no-device"] {
        let (mut version, mut part) = (0, [0; 3]);
        ok!(Blas.cublasGetVersion_v2(null_mut(), &mut version));
        assert_eq!(version, 130_100);
        for (index, part) in part.iter_mut().enumerate() {
            ok!(Blas.cublasGetProperty(index as u32, part));
        }
        assert_eq!(part, [13, 1, 0]);
        ok!(Lt.cublasLtGetProperty(1, &mut part[0]));
        assert_eq!(part[0], 1);
        assert_eq!(code!(Blas.cublasGetProperty(3, &mut version)), 7);
        assert_eq!(code!(Blas.cublasGetProperty(0, null_mut())), 7);
        assert_eq!(text_of(&Blas::get().library, "cublasGetStatusName", 13u32).unwrap(), "CUBLAS_STATUS_EXECUTION_FAILED");
        assert_eq!(text_of(&Blas::get().library, "cublasGetStatusString", 3u32).unwrap(), "the resource allocation failed");
        assert!(!text_of(&Lt::get().library, "cublasLtGetStatusName", 4711u32).unwrap().is_empty());
    }

    fn without_a_device_there_is_no_handle(_) over ["cuda:no-device"] {
        let mut handle = null_mut();
        assert_eq!(code!(Blas.cublasCreate_v2(&mut handle)), 1);
        assert_eq!(code!(Lt.cublasLtCreate(&mut handle)), 1);
        assert!(handle.is_null());
    }

    fn over_a_stub_there_is_no_handle(_) over ["cuda:stub"] {
        assert_eq!(code!(Blas.cublasCreate_v2(&mut null_mut())), 1);
    }

    fn a_forked_child_gets_no_handle(_) over ["cuda"] {
        start(0);
        // SAFETY: the child calls nothing but the library, whose locks nobody holds, and leaves.
        match unsafe { libc::fork() } {
            0 => {
                let code = code!(Blas.cublasCreate_v2(&mut null_mut()));
                // SAFETY: nothing of the child's is left to be done.
                unsafe { libc::_exit(code as i32) }
            }
            child => {
                let mut status = 0;
                // SAFETY: the child is this process's, and the status is written to its own place.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(libc::WEXITSTATUS(status), 1);
            }
        }
    }

    fn a_handle_starts_the_driver_and_makes_the_first_context_current(_) over ["cuda"] {
        let mut context = null_mut();
        assert_eq!(code!(Driver.cuCtxGetCurrent(&mut context)), 3);
        handle();
        ok!(Driver.cuCtxGetCurrent(&mut context));
        assert!(!context.is_null());
        allocate(16);
    }

    fn null_stale_and_foreign_handles_are_not_initialized_and_bad_places_invalid(_) over ["cuda"] {
        start(0);
        assert_eq!(code!(Blas.cublasCreate_v2(null_mut())), 7);
        let (stale, mut lt, mut mode) = (handle(), null_mut(), 0);
        ok!(Lt.cublasLtCreate(&mut lt));
        ok!(Blas.cublasDestroy_v2(stale));
        for bad in [null_mut(), stale, lt] {
            assert_eq!(code!(Blas.cublasDestroy_v2(bad)), 1);
            assert_eq!(code!(Blas.cublasSetStream_v2(bad, null_mut())), 1);
            assert_eq!(code!(Blas.cublasSetWorkspace_v2(bad, 0, 0)), 1);
            assert_eq!(code!(Blas.cublasSetMathMode(bad, 0)), 1);
            assert_eq!(code!(Blas.cublasGetAtomicsMode(bad, &mut mode)), 1);
            assert_eq!(square(bad, 0, 0, 0), 1);
        }
        let handle = handle();
        assert_eq!(code!(Blas.cublasGetStream_v2(handle, null_mut())), 7);
        assert_eq!(code!(Blas.cublasSetMathMode(handle, 5)), 7);
        assert_eq!(code!(Blas.cublasSetAtomicsMode(handle, 2)), 7);
        assert_eq!(code!(Blas.cublasSetPointerMode_v2(handle, 2)), 7);
    }

    fn binding_a_stream_forgets_the_workspace_and_keeps_the_modes(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        let [a, c] = [2.0, 0.0].map(|value| diagonal(value, stream));
        let workspace = allocate(WORKSPACE);
        // Whether the product went through the workspace.
        let went_through = || {
            store(workspace, &[0xabu8; WORKSPACE], stream);
            assert_eq!(square(handle, a, a, c), 0);
            assert!(is_square(c, 4.0, stream));
            download::<u8>(workspace, WORKSPACE, stream).iter().any(|&byte| byte != 0xab)
        };
        ok!(Blas.cublasSetStream_v2(handle, stream));
        assert!(!went_through());
        ok!(Blas.cublasSetWorkspace_v2(handle, workspace, WORKSPACE));
        ok!(Blas.cublasSetMathMode(handle, 3));
        ok!(Blas.cublasSetAtomicsMode(handle, 1));
        assert!(went_through());
        ok!(Blas.cublasSetStream_v2(handle, stream));
        assert!(!went_through(), "the workspace survived a call of cublasSetStream with the same stream");
        let (mut math, mut atomics, mut bound) = (0, 0, null_mut());
        ok!(Blas.cublasGetMathMode(handle, &mut math));
        ok!(Blas.cublasGetAtomicsMode(handle, &mut atomics));
        ok!(Blas.cublasGetStream_v2(handle, &mut bound));
        assert_eq!((math, atomics, bound), (3, 1, stream));
        ok!(Blas.cublasGetPointerMode_v2(handle, &mut math));
        assert_eq!(math, 0);
        ok!(Blas.cublasSetWorkspace_v2(handle, workspace, WORKSPACE));
        assert!(went_through());
        // None at all.
        ok!(Blas.cublasSetWorkspace_v2(handle, workspace, 0));
        assert!(!went_through());
        ok!(Blas.cublasSetWorkspace_v2(handle, 0, 0));
        assert!(!went_through());
        for offset in [16, 64, 128, 256] {
            ok!(Blas.cublasSetWorkspace_v2(handle, workspace + offset, WORKSPACE - 256));
            assert!(went_through());
        }
        ok!(Blas.cublasSetWorkspace_v2(handle, workspace + 1, 1024));
        assert_eq!(code!(Blas.cublasSetWorkspace_v2(handle, 0, 1024)), 7);
    }

    /// The gap between the two kernels of a product lets the other stream's in.
    fn two_streams_with_one_workspace_spoil_each_other_and_with_their_own_do_not(_)
        over ["cuda"] with HIGHWATER_MOCK = "gemm-gap=100ms"
    {
        start(0);
        let (workspace, together) = (allocate(WORKSPACE), &std::sync::Barrier::new(2));
        let both_are_right = |shared: bool| {
            let results: Vec<_> = std::thread::scope(|scope| {
                let threads = [2f32, 3.0].map(|value| {
                    scope.spawn(move || {
                        start(0);
                        let (handle, stream) = (handle(), stream());
                        let [a, c] = [value, 0.0].map(|value| diagonal(value, stream));
                        ok!(Blas.cublasSetStream_v2(handle, stream));
                        if shared {
                            ok!(Blas.cublasSetWorkspace_v2(handle, workspace, WORKSPACE));
                        }
                        (0..5).fold(true, |right, _| {
                            together.wait();
                            assert_eq!(square(handle, a, a, c), 0);
                            is_square(c, value * value, stream) && right
                        })
                    })
                });
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            results == [true, true]
        };
        assert!(!both_are_right(true));
        assert!(both_are_right(false));
    }

    fn a_product_is_enqueued_without_waiting_for_it(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        let [a, c] = [2.0, 0.0].map(|value| diagonal(value, stream));
        ok!(Blas.cublasSetStream_v2(handle, stream));
        let gate = gate_on(stream);
        assert_eq!(square(handle, a, a, c), 0);
        assert_eq!(code!(Driver.cuStreamQuery(stream)), 600);
        gate.open();
        assert!(is_square(c, 4.0, stream));
    }

    fn destroying_a_handle_waits_for_the_device_and_making_one_does_not(_) over ["cuda"] {
        start(0);
        let (idle, stream) = (handle(), stream());
        let gate = gate_on(stream);
        let other = handle();
        let (idle, destroyed) = (Shared(idle), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                start(0);
                ok!(Blas.cublasDestroy_v2(idle.get()));
                destroyed.store(true, Ordering::Release);
            });
            std::thread::sleep(Duration::from_millis(60));
            assert!(!destroyed.load(Ordering::Acquire));
            gate.open();
            thread.join().unwrap();
        });
        ok!(Blas.cublasDestroy_v2(other));
    }

    fn a_handle_takes_device_memory_and_gives_it_back(_) over ["cuda"] with HIGHWATER_MOCK = "memory=64GiB" {
        start(0);
        let free = || {
            let (mut free, mut total) = (0, 0);
            ok!(Driver.cuMemGetInfo_v2(&mut free, &mut total));
            free
        };
        let before = free();
        let first = handle();
        assert_eq!(before - free(), 64 << 20);
        ok!(Blas.cublasDestroy_v2(first));
        assert_eq!(free(), before);
    }

    fn a_handle_that_finds_no_memory_is_not_made(_)
        over ["cuda"] with CUBLAS_WORKSPACE_CONFIG = ":1024:8" with HIGHWATER_MOCK = "memory=15MiB"
    {
        start(0);
        let first = handle();
        let mut second = null_mut();
        assert_eq!(code!(Blas.cublasCreate_v2(&mut second)), 3);
        ok!(Blas.cublasDestroy_v2(first));
        ok!(Blas.cublasCreate_v2(&mut second));
    }

    fn making_a_handle_in_a_capture_fails_and_loses_the_capture(_) over ["cuda"] {
        start(0);
        let (stream, mut graph) = (stream(), null_mut());
        // Thread-local, then relaxed.
        ok!(Driver.cuStreamBeginCapture_v2(stream, 1));
        assert_eq!(code!(Blas.cublasCreate_v2(&mut null_mut())), 1);
        assert_eq!(code!(Driver.cuStreamEndCapture(stream, &mut graph)), 901);
        ok!(Driver.cuStreamBeginCapture_v2(stream, 2));
        handle();
        ok!(Driver.cuStreamEndCapture(stream, &mut graph));
    }

    fn a_captured_product_is_replayed_on_what_its_memory_holds_then(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        let [a, b, c] = [2.0, 3.0, 0.0].map(|value| diagonal(value, stream));
        let workspace = allocate(WORKSPACE);
        let (mut graph, mut executable) = (null_mut(), null_mut());
        ok!(Driver.cuStreamBeginCapture_v2(stream, 1));
        ok!(Blas.cublasSetStream_v2(handle, stream));
        ok!(Blas.cublasSetWorkspace_v2(handle, workspace, WORKSPACE));
        assert_eq!(square(handle, a, b, c), 0);
        ok!(Driver.cuStreamEndCapture(stream, &mut graph));
        ok!(Driver.cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        assert!(is_square(c, 0.0, stream));
        ok!(Driver.cuGraphLaunch(executable, stream));
        assert!(is_square(c, 6.0, stream));
        store(a, &download::<f32>(b, EDGE * EDGE, stream), stream);
        ok!(Driver.cuGraphLaunch(executable, stream));
        assert!(is_square(c, 9.0, stream));
    }

    /// As an H200 records them: 4 for a large product on the handle's own workspace.
    fn a_capture_records_memory_for_large_products_on_the_handles_own_workspace_only(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        let (block, workspace) = (upload(&vec![1f32; 256 * 256], stream), allocate(1 << 20));
        let result = allocate(256 * 256 * 4);
        let (one, zero) = (1f32, 0f32);
        // Types of the nodes: 0 kernel, 10 memory allocated, 11 memory freed.
        let nodes = |edge: i32, bind: &dyn Fn()| {
            let (mut graph, mut executable) = (null_mut(), null_mut());
            ok!(Driver.cuStreamBeginCapture_v2(stream, 1));
            ok!(Blas.cublasSetStream_v2(handle, stream));
            bind();
            ok!(Blas.cublasSgemm_v2(handle, 0, 0, edge, edge, edge, &one, block, edge, block, edge, &zero, result, edge));
            ok!(Driver.cuStreamEndCapture(stream, &mut graph));
            let (mut found, mut count) = ([null_mut(); 8], 8);
            ok!(Driver.cuGraphGetNodes(graph, found.as_mut_ptr(), &mut count));
            let types = found[..count].iter().map(|&node| {
                let mut node_type = 0;
                ok!(Driver.cuGraphNodeGetType(node, &mut node_type));
                node_type
            });
            let types: Vec<_> = types.collect();
            if edge == 256 {
                ok!(Driver.cuGraphInstantiateWithFlags(&mut executable, graph, 0));
                ok!(Driver.cuGraphLaunch(executable, stream));
                assert!(download::<f32>(result, 256 * 256, stream).iter().all(|&value| value == 256.0));
            }
            types
        };
        assert_eq!(nodes(32, &|| ()), [0]);
        assert_eq!(nodes(256, &|| ()), [10, 0, 0, 11]);
        assert_eq!(nodes(256, &|| ok!(Blas.cublasSetWorkspace_v2(handle, workspace, 1 << 20))), [0, 0]);
        assert_eq!(nodes(256, &|| ok!(Blas.cublasSetWorkspace_v2(handle, 0, 0))), [0]);
    }

    /// Also a handler that was registered before `cuInit`, and so runs after the driver's own.
    fn destroying_a_handle_at_exit_succeeds(_) over ["cuda"] {
        static HANDLE: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn at_exit() {
            let handle = HANDLE.load(Ordering::Acquire) as *mut c_void;
            let codes = (code!(Driver.cuCtxSynchronize()), code!(Blas.cublasDestroy_v2(handle)));
            // SAFETY: the process is at its end.
            unsafe { libc::_exit(if codes == (4, 0) { 42 } else { 1 }) }
        }
        // SAFETY: nothing was started in this process yet, and the child ends itself.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: the handler is a function of this program.
                assert_eq!(unsafe { libc::atexit(at_exit) }, 0);
                start(0);
                HANDLE.store(handle() as usize, Ordering::Release);
                // SAFETY: the child has one thread.
                unsafe { libc::exit(0) }
            }
            child => {
                let mut status = 0;
                // SAFETY: the child is this process's, and the status is written to its own place.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(libc::WEXITSTATUS(status), 42);
            }
        }
    }

    fn threads_with_handles_of_their_own_do_not_disturb_each_other(_) over ["cuda"] {
        std::thread::scope(|scope| {
            for value in 1..=6u8 {
                scope.spawn(move || {
                    start(0);
                    let (stream, value) = (stream(), f32::from(value));
                    let [a, c] = [value, 0.0].map(|value| diagonal(value, stream));
                    let workspace = allocate(WORKSPACE);
                    for round in 0..20 {
                        let handle = handle();
                        ok!(Blas.cublasSetStream_v2(handle, stream));
                        if round % 2 == 0 {
                            ok!(Blas.cublasSetWorkspace_v2(handle, workspace, WORKSPACE));
                        }
                        assert_eq!(square(handle, a, a, c), 0);
                        assert!(is_square(c, value * value, stream));
                        ok!(Blas.cublasDestroy_v2(handle));
                    }
                });
            }
        });
    }

    fn a_fault_of_the_mock_is_a_launch_that_fails_once(_) over ["cuda"] with HIGHWATER_MOCK = "fail=gemm:2" {
        start(0);
        let (handle, stream) = (handle(), stream());
        let [a, c] = [2.0, 0.0].map(|value| diagonal(value, stream));
        ok!(Blas.cublasSetStream_v2(handle, stream));
        assert_eq!([(); 3].map(|()| square(handle, a, a, c)), [0, 13, 0]);
        assert!(is_square(c, 4.0, stream));
    }

    fn operands_that_a_kernel_would_reach_and_the_mock_does_not_are_not_supported(_)
        over ["cuda"] with HIGHWATER_MOCK = "devices=2"
    {
        start(1);
        let foreign = diagonal(1.0, null_mut());
        start(0);
        let (handle, c) = (handle(), diagonal(0.0, null_mut()));
        let (mut pinned, mut context) = (null_mut(), null_mut());
        ok!(Driver.cuMemHostAlloc(&mut pinned, EDGE * EDGE * 4, 0));
        assert_eq!(square(handle, pinned as u64, c, c), 15);
        ok!(Driver.cuDevicePrimaryCtxRetain(&mut context, 1));
        ok!(Driver.cuCtxEnablePeerAccess(context, 0));
        assert_eq!(square(handle, foreign, c, c), 15);
        ok!(Driver.cuCtxSynchronize());
        // The other way access was not enabled.
        start(1);
        assert_eq!(square(self::handle(), c, foreign, foreign), 0);
        assert_eq!(code!(Driver.cuCtxSynchronize()), 700);
    }

    fn a_product_in_a_thread_without_a_context_makes_one_current(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        let [a, c] = [2.0, 0.0].map(|value| diagonal(value, stream));
        ok!(Blas.cublasSetStream_v2(handle, stream));
        let handle = Shared(handle);
        std::thread::spawn(move || {
            let mut context = null_mut();
            ok!(Driver.cuCtxGetCurrent(&mut context));
            assert!(context.is_null());
            assert_eq!(square(handle.get(), a, a, c), 0);
            ok!(Driver.cuCtxGetCurrent(&mut context));
            assert!(!context.is_null());
            allocate(16);
        })
        .join()
        .unwrap();
        assert!(is_square(c, 4.0, stream));
    }

    fn a_handle_works_on_its_devices_streams_whatever_context_is_current(_) over ["cuda"] with HIGHWATER_MOCK = "devices=2" {
        start(0);
        let (handle, stream) = (handle(), stream());
        let [a, c] = [2.0, 0.0].map(|value| diagonal(value, stream));
        start(1);
        ok!(Blas.cublasSetStream_v2(handle, stream));
        assert_eq!(square(handle, a, a, c), 0);
        assert!(is_square(c, 4.0, stream));
    }

    fn a_stream_of_another_device_succeeds_and_loses_the_contexts(_) over ["cuda"] with HIGHWATER_MOCK = "devices=2" {
        start(0);
        let handle = handle();
        let c = diagonal(0.0, null_mut());
        start(1);
        let foreign = stream();
        ok!(Blas.cublasSetStream_v2(handle, foreign));
        assert_eq!(square(handle, c, c, c), 0);
        assert_eq!(code!(Driver.cuStreamSynchronize(foreign)), 700);
        assert_eq!(code!(Driver.cuCtxSynchronize()), 700);
        assert_eq!(square(handle, c, c, c), 13);
        assert_eq!(code!(Blas.cublasCreate_v2(&mut null_mut())), 1);
        // For good.
        assert_eq!(code!(Driver.cuMemAlloc_v2(&mut 0, 16)), 700);
    }

    fn the_null_stream_is_that_of_the_current_context(_) over ["cuda"] with HIGHWATER_MOCK = "devices=2" {
        start(0);
        let handle = handle();
        let [a, c] = [2.0, 0.0].map(|value| diagonal(value, null_mut()));
        assert_eq!(square(handle, a, a, c), 0);
        assert!(is_square(c, 4.0, null_mut()));
        start(1);
        assert_eq!(square(handle, a, a, c), 0);
        assert_eq!(code!(Driver.cuCtxSynchronize()), 700);
    }

    fn an_address_of_nobody_fails_and_loses_the_context(_) over ["cuda"] {
        start(0);
        let (handle, c) = (handle(), diagonal(0.0, null_mut()));
        assert_eq!(square(handle, 0x1000, c, c), 13);
        assert_eq!(code!(Driver.cuCtxSynchronize()), 700);
    }

    fn an_address_between_two_elements_succeeds_and_loses_the_context(_) over ["cuda"] {
        start(0);
        let (handle, c) = (handle(), diagonal(0.0, null_mut()));
        assert_eq!(square(handle, c + 2, c, c), 0);
        assert_eq!(code!(Driver.cuCtxSynchronize()), 716);
    }

    fn wrong_arguments_are_told_from_unsupported_ones(_) over ["cuda"] {
        start(0);
        let handle = handle();
        let c = diagonal(0.0, null_mut());
        let (one, zero) = (1f32, 0f32);
        let (one, zero) = (std::ptr::from_ref(&one).cast::<c_void>(), std::ptr::from_ref(&zero).cast::<c_void>());
        let run = |operation: u32, sizes: [i32; 3], ld: [i32; 3], types: [u32; 3], compute: u32, alpha: *const c_void| {
            code!(Blas.cublasGemmEx(
                handle, operation, 0, sizes[0], sizes[1], sizes[2], alpha, c, types[0], ld[0], c, types[1], ld[1], zero, c,
                types[2], ld[2], compute, -1
            ))
        };
        assert_eq!(run(0, [4, 4, 4], [4; 3], [F32; 3], 68, one), 0);
        for (operation, sizes, ld) in [
            (3, [4, 4, 4], [4; 3]),
            (0, [-1, 4, 4], [4; 3]),
            (0, [4, 4, -4], [4; 3]),
            (0, [4, 4, 4], [3, 4, 4]),
            (0, [4, 4, 4], [4, 3, 4]),
            (0, [4, 4, 4], [4, 4, 3]),
            (1, [2, 4, 4], [3, 4, 4]),
            (0, [0, 4, 4], [0, 4, 1]),
        ] {
            assert_eq!(run(operation, sizes, ld, [F32; 3], 68, one), 7, "{operation} {sizes:?} {ld:?}");
        }
        assert_eq!(run(0, [4, 4, 4], [4; 3], [F32; 3], 68, std::ptr::null()), 7);
        assert_eq!(run(0, [4, 4, 4], [4; 3], [F32; 3], 1, one), 15);
        for (types, compute) in
            [([F32, F64, F32], 68), ([F64; 3], 68), ([F32; 3], 70), ([F16, F16, F32], 64), ([3, 3, 10], 72), ([4; 3], 68)]
        {
            assert_eq!(run(0, [4, 4, 4], [4; 3], types, compute, one), 15, "{types:?} in {compute}");
        }
        // Nothing to do, whatever the addresses are.
        for sizes in [[0, 4, 4], [4, 0, 4]] {
            assert_eq!(run(0, sizes, [4; 3], [F32; 3], 68, one), 0);
        }
        assert_eq!(code!(Blas.cublasSgemmStridedBatched(
            handle, 0, 0, 4, 4, 4, one.cast(), c, 4, 16, c, 4, 16, zero.cast(), c, 4, 16, -1
        )), 7);
        ok!(Driver.cuCtxSynchronize());
    }
}
