//! hipBLAS: handles, the numbers of its types, products.

use std::ffi::c_void;
use std::ptr::null_mut;

use highwater_simulated_harness::isolated::version;
use highwater_simulated_harness::values::{BF16, F16, F32, F64, bytes, decode, diagonal_of, encode, is_diagonal};
use highwater_simulated_harness::{Shared, code, isolated, ok};

use crate::rig::{Blas, Hip, Ptr, allocate, download, free_bytes, gate_on, optional, store, stream, text, upload};

/// `HIPBLAS_OP_N` and `HIPBLAS_OP_T`.
const PLAIN: i32 = 111;
const TRANSPOSED: i32 = 112;
/// `HIPBLAS_GEMM_DEFAULT`.
const DEFAULT: i32 = 160;
/// Edge of the matrices below.
const EDGE: usize = 80;
const WORKSPACE: usize = 1 << 16;

macro_rules! types {
    ($($name:ident($($argument:ty),*);)*) => { $(type $name = unsafe extern "C" fn($($argument),*) -> i32;)* };
}

types! {
    GemmEx(
        Ptr, i32, i32, i32, i32, i32, *const c_void, Ptr, i32, i32, Ptr, i32, i32, *const c_void, Ptr, i32, i32, i32, i32);
    GemmEx64(
        Ptr, i32, i32, i64, i64, i64, *const c_void, Ptr, i32, i64, Ptr, i32, i64, *const c_void, Ptr, i32, i64, i32, i32);
    Batched(
        Ptr, i32, i32, i32, i32, i32, *const c_void, Ptr, i32, i32, i64, Ptr, i32, i32, i64, *const c_void, Ptr, i32, i32,
        i64, i32, i32, i32);
    SetWorkspace(Ptr, Ptr, usize);
}

/// The symbol that takes `hipDataType` in the version at hand.
fn new_symbol(base: &str) -> String {
    if version() == Some(6) { format!("{base}_v2") } else { base.to_owned() }
}

fn gemm_ex() -> GemmEx {
    optional("hipblas", &new_symbol("hipblasGemmEx")).unwrap()
}

fn handle() -> Ptr {
    let mut handle = null_mut();
    ok!(Blas.hipblasCreate(&mut handle));
    handle
}

/// `C = A * B` of square matrices of 32 bits by a symbol, with the numbers for the type and the computation.
fn square_by(symbol: GemmEx, numbers: [i32; 2], handle: Ptr, a: Ptr, b: Ptr, c: Ptr) -> i32 {
    let ([of, compute], edge) = (numbers, EDGE as i32);
    let (one, zero) = (1f32, 0f32);
    let (one, zero) = (std::ptr::from_ref(&one).cast(), std::ptr::from_ref(&zero).cast());
    // SAFETY: the matrices are as large as it says, and the scales are read during the call.
    unsafe {
        symbol(
            handle, PLAIN, PLAIN, edge, edge, edge, one, a, of, edge, b, of, edge, zero, c, of, edge, compute, DEFAULT,
        )
    }
}

fn square(handle: Ptr, a: Ptr, b: Ptr, c: Ptr) -> i32 {
    square_by(gemm_ex(), [0, 2], handle, a, b, c)
}

/// A square matrix that is `value` on its diagonal.
fn diagonal(value: f32, stream: Ptr) -> Ptr {
    upload(&diagonal_of(EDGE, value), stream)
}

fn is_square(c: Ptr, value: f32, stream: Ptr) -> bool {
    is_diagonal(&download(c, EDGE * EDGE, stream), EDGE, value)
}

isolated! {
    fn statuses_have_names_and_null_handles_codes_of_their_own(_) over ["rocm", "rocm6"] {
        assert_eq!(text("hipblas", "hipblasStatusToString", 7), "HIPBLAS_STATUS_NOT_SUPPORTED");
        assert_eq!(text("hipblas", "hipblasStatusToString", 11), "HIPBLAS_STATUS_UNKNOWN");
        assert!(text("hipblas", "hipblasStatusToString", 12).starts_with("<undefined"));
        assert_eq!(code!(Blas.hipblasCreate(null_mut())), 9);
        let stale = handle();
        ok!(Blas.hipblasDestroy(stale));
        for bad in [null_mut(), stale] {
            assert_eq!(code!(Blas.hipblasDestroy(bad)), 1);
            assert_eq!(code!(Blas.hipblasSetStream(bad, null_mut())), 1);
            assert_eq!(square(bad, null_mut(), null_mut(), null_mut()), 1);
        }
    }

    fn modes_are_those_of_the_version(version) over ["rocm", "rocm6"] {
        let (handle, mut mode) = (handle(), 9);
        ok!(Blas.hipblasGetAtomicsMode(handle, &mut mode));
        assert_eq!(mode, i32::from(version == 6));
        for wanted in [0, 1] {
            ok!(Blas.hipblasSetAtomicsMode(handle, wanted));
            ok!(Blas.hipblasGetAtomicsMode(handle, &mut mode));
            assert_eq!(mode, wanted);
        }
        ok!(Blas.hipblasGetPointerMode(handle, &mut mode));
        assert_eq!(mode, 0);
        assert_eq!((code!(Blas.hipblasSetAtomicsMode(handle, 2)), code!(Blas.hipblasSetPointerMode(handle, 2))), (10, 10));
        assert_eq!([1, 2, 99].map(|mode| code!(Blas.hipblasSetMathMode(handle, mode))), [0, 7, 7]);
        ok!(Blas.hipblasGetMathMode(handle, &mut mode));
        assert_eq!(mode, 1);
    }

    fn each_version_has_its_symbols(version) over ["rocm", "rocm6"] {
        let has = |symbol: &str| optional::<Ptr>("hipblas", symbol).is_some();
        for symbol in ["hipblasGemmEx", "hipblasGemmEx_64", "hipblasGemmStridedBatchedEx", "hipblasGemmStridedBatchedEx_64"] {
            assert!(has(symbol), "{symbol}");
        }
        for symbol in [
            "hipblasGemmEx_v2", "hipblasGemmEx_v2_64", "hipblasGemmStridedBatchedEx_v2", "hipblasGemmStridedBatchedEx_v2_64",
        ] {
            assert_eq!(has(symbol), version == 6, "{symbol}");
        }
        assert_eq!(has("hipblasSetWorkspace"), version == 7);
    }

    fn each_symbol_takes_the_numbers_of_its_version(version) over ["rocm", "rocm6"] {
        let (handle, [a, c]) = (handle(), [2.0, 0.0].map(|value| diagonal(value, null_mut())));
        let plain: GemmEx = optional("hipblas", "hipblasGemmEx").unwrap();
        let (new, old) = ([0, 2], [151, 151]);
        let codes = [new, old].map(|numbers| square_by(plain, numbers, handle, a, a, c));
        assert_eq!(codes, if version == 6 { [10, 0] } else { [0, 7] });
        assert!(is_square(c, 4.0, null_mut()));
        assert_eq!(square(handle, a, c, c), 0);
    }

    fn products_are_right_in_every_type(_) over ["rocm", "rocm6"] {
        let (handle, stream, symbol) = (handle(), stream(), gemm_ex());
        ok!(Blas.hipblasSetStream(handle, stream));
        // A is 2x3, transposed from 3x2; B is 3x2. All values are exact in every type.
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, -1.0, 2.0, 1.0, 0.5]);
        let expected = [-2.0f64, -2.0, 5.5, 16.0];
        let c = allocate(32);
        let run = |input: u32, output: u32, compute: i32| {
            let [a, b] = [a, b].map(|values| upload(&encode(input, &values), stream));
            let of_scales = match compute {
                7 => F64,
                0 => F16,
                _ => F32,
            };
            let [one, zero] = [1.0, 0.0].map(|value| encode(of_scales, &[value]));
            let (of, to) = (input as i32, output as i32);
            // SAFETY: the matrices are as large as it says, and the scales are read during the call.
            unsafe {
                symbol(
                    handle, TRANSPOSED, PLAIN, 2, 2, 3, one.as_ptr().cast(), a, of, 3, b, of, 3, zero.as_ptr().cast(), c, to, 2,
                    compute, DEFAULT,
                )
            }
        };
        for (input, output, compute) in [
            (F32, F32, 2), (F64, F64, 7), (F16, F16, 0), (F16, F16, 2), (BF16, BF16, 2), (F16, F32, 2), (BF16, F32, 2),
        ] {
            store(c, &[0u8; 32], stream);
            assert_eq!(run(input, output, compute), 0, "{input} {output} {compute}");
            assert_eq!(decode(output, &download(c, 4 * bytes(output), stream)), expected, "{input} {output} {compute}");
        }
        for (input, output, compute) in [(0, 0, 6), (0, 2, 2), (1, 1, 2), (0, 0, 7), (2, 0, 0), (3, 10, 9), (0, 0, 20), (99, 99, 2)] {
            assert_eq!(run(input, output, compute), 7, "{input} {output} {compute}");
        }
    }

    fn batches_and_wide_sizes_are_computed(_) over ["rocm", "rocm6"] {
        let (handle, stream) = (handle(), stream());
        ok!(Blas.hipblasSetStream(handle, stream));
        let batched: Batched = optional("hipblas", &new_symbol("hipblasGemmStridedBatchedEx")).unwrap();
        let wide: GemmEx64 = optional("hipblas", &format!("{}_64", new_symbol("hipblasGemmEx"))).unwrap();
        let (one, two) = (1f32, 2f32);
        let (one, two): (*const c_void, *const c_void) = (std::ptr::from_ref(&one).cast(), std::ptr::from_ref(&two).cast());
        let (a, b) = (upload(&[3f32, 5.0], stream), upload(&[7f32, 11.0], stream));
        let c = upload(&[100f32, 200.0], stream);
        let batch = |count| {
            // SAFETY: the matrices are as large as it says, and the scales are read during the call.
            unsafe {
                batched(
                    handle, PLAIN, PLAIN, 1, 1, 1, one, a, 0, 1, 1, b, 0, 1, 1, two, c, 0, 1, 1, count, 2, DEFAULT,
                )
            }
        };
        assert_eq!(batch(2), 0);
        assert_eq!(download::<f32>(c, 2, stream), [221.0, 455.0]);
        assert_eq!((batch(0), batch(-1)), (0, 3));
        // SAFETY: as above.
        let code = unsafe {
            wide(handle, PLAIN, PLAIN, 1, 1, 1, one, a, 0, 1, b, 0, 1, two, c, 0, 1, 2, DEFAULT)
        };
        assert_eq!((code, download::<f32>(c, 2, stream)), (0, vec![463.0, 455.0]));
    }

    fn wrong_arguments_are_told_from_unsupported_ones(_) over ["rocm", "rocm6"] {
        let (handle, c, symbol) = (handle(), diagonal(0.0, null_mut()), gemm_ex());
        let one = 1f32;
        let one: *const c_void = std::ptr::from_ref(&one).cast();
        let run = |operation: i32, [m, n, k]: [i32; 3], ld: [i32; 3], algo: i32, alpha: *const c_void| {
            // SAFETY: the matrices are as large as it says, or the sizes are wrong, which is checked.
            unsafe {
                symbol(handle, operation, PLAIN, m, n, k, alpha, c, 0, ld[0], c, 0, ld[1], one, c, 0, ld[2], 2, algo)
            }
        };
        assert_eq!(run(PLAIN, [4; 3], [4; 3], DEFAULT, one), 0);
        for (operation, algo) in [(0, DEFAULT), (1, DEFAULT), (114, DEFAULT), (PLAIN, 0), (PLAIN, -1)] {
            assert_eq!(run(operation, [4; 3], [4; 3], algo, one), 10, "{operation} {algo}");
        }
        for (operation, sizes, ld) in [
            (PLAIN, [-1, 4, 4], [4; 3]), (PLAIN, [4, 4, -4], [4; 3]), (PLAIN, [4; 3], [3, 4, 4]), (PLAIN, [4; 3], [4, 3, 4]),
            (PLAIN, [4; 3], [4, 4, 3]), (TRANSPOSED, [2, 4, 4], [3, 4, 4]),
        ] {
            assert_eq!(run(operation, sizes, ld, DEFAULT, one), 3, "{operation} {sizes:?} {ld:?}");
        }
        assert_eq!(run(PLAIN, [4; 3], [4; 3], DEFAULT, std::ptr::null()), 3);
        // Nothing to do.
        assert_eq!(run(PLAIN, [0, 4, 4], [4; 3], DEFAULT, one), 0);
    }

    /// The devices are gfx942. The math mode of TF32 is accepted, but a product keeps the bits that TF32 would drop.
    fn tf32_is_no_compute_type_and_a_math_mode_without_effect(_) over ["rocm", "rocm6"] {
        let value = 1.0 + f32::EPSILON;
        let (handle, [a, c]) = (handle(), [value, 0.0].map(|value| diagonal(value, null_mut())));
        for mode in [0, 1] {
            ok!(Blas.hipblasSetMathMode(handle, mode));
            assert_eq!([6, 2].map(|compute| square_by(gemm_ex(), [0, compute], handle, a, a, c)), [7, 0]);
            assert!(is_square(c, value * value, null_mut()));
        }
    }

    fn a_bound_workspace_is_used_and_survives_a_change_of_the_stream(7) over ["rocm"] {
        let (handle, stream) = (handle(), stream());
        let [a, c] = [2.0, 0.0].map(|value| diagonal(value, stream));
        let workspace = allocate(WORKSPACE);
        let bind: SetWorkspace = optional("hipblas", "hipblasSetWorkspace").unwrap();
        // SAFETY: the workspace lives on, or is none.
        let bind = |address, bytes| unsafe { bind(handle, address, bytes) };
        let went_through = || {
            store(workspace, &[0xabu8; WORKSPACE], stream);
            assert_eq!(square(handle, a, a, c), 0);
            assert!(is_square(c, 4.0, stream));
            download::<u8>(workspace, WORKSPACE, stream).iter().any(|&byte| byte != 0xab)
        };
        ok!(Blas.hipblasSetStream(handle, stream));
        assert!(!went_through());
        assert_eq!(bind(workspace, WORKSPACE), 0);
        assert!(went_through());
        ok!(Blas.hipblasSetStream(handle, null_mut()));
        ok!(Blas.hipblasSetStream(handle, stream));
        assert!(went_through());
        let mut bound = null_mut();
        ok!(Blas.hipblasGetStream(handle, &mut bound));
        assert_eq!(bound, stream);
        assert_eq!(bind(null_mut(), 0), 0);
        assert!(!went_through());
        assert_eq!(bind(null_mut(), 5), 0);
        assert!(!went_through());
    }

    /// The call waits between the two kernels of a product, so that the other stream's come in between.
    fn two_streams_of_one_handle_meet_in_its_own_workspace(_)
        over ["rocm", "rocm6"] with HIGHWATER_MOCK = "gemm-gap=100ms"
    {
        let shared = Shared(handle());
        let together = std::sync::Barrier::new(2);
        let both_are_right = |handles: [Shared; 2]| {
            std::thread::scope(|scope| {
                let threads = [(2f32, handles[0], 0), (3.0, handles[1], 30)].map(|(value, handle, delay)| {
                    let together = &together;
                    scope.spawn(move || {
                        let stream = stream();
                        let [a, c] = [value, 0.0].map(|value| diagonal(value, stream));
                        together.wait();
                        std::thread::sleep(std::time::Duration::from_millis(delay));
                        ok!(Blas.hipblasSetStream(handle.get(), stream));
                        assert_eq!(square(handle.get(), a, a, c), 0);
                        is_square(c, value * value, stream)
                    })
                });
                threads.map(|thread| thread.join().unwrap()) == [true; 2]
            })
        };
        assert!(both_are_right([Shared(handle()), Shared(handle())]));
        assert!((0..10).any(|_| !both_are_right([shared; 2])));
    }

    fn a_product_is_enqueued_and_a_captured_one_replayed(_) over ["rocm", "rocm6"] {
        let (handle, stream) = (handle(), stream());
        let [a, b, c] = [2.0, 3.0, 0.0].map(|value| diagonal(value, stream));
        ok!(Blas.hipblasSetStream(handle, stream));
        let gate = gate_on(stream);
        assert_eq!(square(handle, a, a, c), 0);
        assert_eq!(code!(Hip.hipStreamQuery(stream)), 600);
        gate.open();
        assert!(is_square(c, 4.0, stream));
        let (mut graph, mut executable) = (null_mut(), null_mut());
        ok!(Hip.hipStreamBeginCapture(stream, 1));
        assert_eq!(square(handle, a, b, c), 0);
        ok!(Hip.hipStreamEndCapture(stream, &mut graph));
        ok!(Hip.hipGraphInstantiate(&mut executable, graph, null_mut(), null_mut(), 0));
        assert!(is_square(c, 4.0, stream));
        ok!(Hip.hipGraphLaunch(executable, stream));
        assert!(is_square(c, 6.0, stream));
        // Making a handle loses a capture, because that takes memory, and a dead stream multiplies nothing.
        ok!(Hip.hipStreamBeginCapture(stream, 0));
        assert_eq!(code!(Blas.hipblasCreate(&mut null_mut())), 6);
        assert_eq!(code!(Hip.hipStreamEndCapture(stream, &mut graph)), 901);
        assert_eq!(square(handle, a, b, c), 6);
    }

    fn a_handle_takes_memory_of_its_device_and_waits_for_it_at_its_end(_)
        over ["rocm", "rocm6"] with HIGHWATER_MOCK = "devices=2,memory=64GiB"
    {
        let before = free_bytes();
        let handle = handle();
        assert_eq!(before - free_bytes(), 32 << 20);
        let stream = stream();
        let gate = gate_on(stream);
        let handle = Shared(handle);
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                let mut device = -1;
                ok!(Hip.hipSetDevice(1));
                ok!(Blas.hipblasDestroy(handle.get()));
                ok!(Hip.hipGetDevice(&mut device));
                device
            });
            std::thread::sleep(std::time::Duration::from_millis(60));
            assert!(!thread.is_finished());
            gate.open();
            assert_eq!(thread.join().unwrap(), 1);
        });
        assert_eq!(free_bytes(), before);
    }

    fn kernels_find_registered_memory_at_its_other_address_only(_) over ["rocm", "rocm6"] {
        let (handle, c) = (handle(), diagonal(0.0, null_mut()));
        let bytes = EDGE * EDGE * 4;
        let own = Box::leak(vec![0f32; EDGE * EDGE].into_boxed_slice()).as_mut_ptr().cast();
        ok!(Hip.hipHostRegister(own, bytes, 3));
        let mut there = null_mut();
        ok!(Hip.hipHostGetDevicePointer(&mut there, own, 0));
        // Those of the mock do not reach memory of the host, which is told from what no kernel reaches.
        assert_eq!((square(handle, there, c, c), code!(Hip.hipDeviceSynchronize())), (7, 0));
        assert_eq!((square(handle, own, c, c), code!(Hip.hipDeviceSynchronize())), (0, 700));
    }

    fn without_kernels_there_are_handles(_) over ["rocm:no-kernels", "rocm6:no-kernels"] {
        let handle = handle();
        // A product of nothing needs none.
        let one = 1f32;
        let one: *const c_void = std::ptr::from_ref(&one).cast();
        let nothing = null_mut();
        // SAFETY: there are no elements.
        let code = unsafe {
            gemm_ex()(
                handle, PLAIN, PLAIN, 0, 4, 4, one, nothing, 0, 4, nothing, 0, 4, one, nothing, 0, 4, 2, DEFAULT,
            )
        };
        assert_eq!(code, 0);
        ok!(Blas.hipblasDestroy(handle));
    }

    fn without_kernels_the_first_product_ends_the_process(_)
        over ["rocm:no-kernels", "rocm6:no-kernels"] aborts "Cannot read rocblas/library/TensileLibrary.dat"
    {
        let (handle, c) = (handle(), diagonal(0.0, null_mut()));
        square(handle, c, c, c);
    }
}
