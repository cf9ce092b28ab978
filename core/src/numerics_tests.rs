//! Which calls the policy makes on a handle, and in which order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use HandleCall::{CreatePlan, Gemm, RunPlan, SetAtomicsMode, SetMathMode, SetStream, SetWorkspace};
use highwater_hal::{
    Answer, Backend, BackendLayer, BlasHandle, BlasOptions, Call, HandleLayer, PlanArguments, PlanOptions, Workspace,
};
use highwater_mock::{MockGpu, MockOptions, Operation};

use crate::{
    AtomicsMode, BlasLease, Capabilities, DataType, DeviceBuffer, Epilogue, ErrorKind, GemmShape, LtLease, MathMode,
    Numerics, PlanId, Result, Runtime, RuntimeOptions, Scalar, Stream, StreamId, numerics,
};

const TF32: Numerics = Numerics::new().allow_tf32();
const QUICK: Numerics = Numerics::new().allow_nondeterminism();
const BOTH: Numerics = TF32.allow_nondeterminism();

/// A call on a handle of any kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HandleCall {
    SetStream,
    SetWorkspace,
    SetMathMode(MathMode),
    SetAtomicsMode(AtomicsMode),
    Gemm(DataType),
    CreatePlan(MathMode, AtomicsMode),
    RunPlan(PlanId),
}

/// The mock, with handles that note the calls.
#[derive(Debug)]
struct Noting {
    gpu: Arc<MockGpu>,
    calls: Arc<Mutex<Vec<HandleCall>>>,
}

impl Noting {
    /// Returns the calls on handles since the last call of this.
    fn take_handle_calls(&self) -> Vec<HandleCall> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

// SAFETY: everything is passed on to the mock.
unsafe impl BackendLayer for Noting {
    fn below(&self) -> &dyn Backend {
        &*self.gpu
    }
    fn around<T: Answer>(&self, _: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        let answer = forward(&*self.gpu);
        assert_eq!(self.gpu.violations(), [], "core broke a rule");
        answer
    }
    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let below = self.gpu.create_blas_handle(device, options)?;
        Ok(Box::new(NotingHandle { below, calls: Arc::clone(&self.calls) }))
    }
}

#[derive(Debug)]
struct NotingHandle {
    below: Box<dyn BlasHandle>,
    calls: Arc<Mutex<Vec<HandleCall>>>,
}

/// Methods of a handle that note the call and forward it.
macro_rules! noted {
    ($([$($fn:tt)+] $method:ident($($argument:ident: $type:ty),+) -> $answer:ty: $note:expr;)+) => {$(
        $($fn)+ $method(&mut self, $($argument: $type),+) -> Result<$answer> {
            self.calls.lock().unwrap().push($note);
            #[allow(unused_unsafe, reason = "some methods are safe to call")]
            // SAFETY: as the caller promises.
            unsafe { self.below.$method($($argument),+) }
        }
    )+};
}

impl HandleLayer for NotingHandle {
    fn below(&self) -> &dyn BlasHandle {
        &*self.below
    }
    fn around<T: Answer>(&mut self, _: &Call, forward: impl FnOnce(&mut dyn BlasHandle) -> Result<T>) -> Result<T> {
        forward(&mut *self.below)
    }
    noted! {
        [fn] set_stream(stream: StreamId) -> (): SetStream;
        [unsafe fn] set_workspace(workspace: Option<Workspace>) -> (): SetWorkspace;
        [fn] set_math_mode(mode: MathMode) -> (): SetMathMode(mode);
        [fn] set_atomics_mode(mode: AtomicsMode) -> (): SetAtomicsMode(mode);
        [unsafe fn] gemm(gemm: &highwater_hal::Gemm) -> (): Gemm(gemm.shape.data_type);
        [fn] create_plan(options: &PlanOptions) -> PlanId: CreatePlan(options.math_mode, options.atomics_mode);
        [unsafe fn] run_plan(plan: PlanId, arguments: &PlanArguments) -> (): RunPlan(plan);
    }
}

struct Bench {
    backend: Arc<Noting>,
    runtime: Runtime,
    stream: Stream,
}

impl Bench {
    fn new(policy: Numerics) -> Self {
        Self::with_capabilities(policy, |_| ())
    }

    fn with_capabilities(policy: Numerics, change: impl FnOnce(&mut Capabilities)) -> Self {
        let gpu = MockGpu::open(MockOptions::new().with_checks().with_capabilities(change)).unwrap();
        let backend = Arc::new(Noting { gpu, calls: Arc::default() });
        let runtime = Runtime::with_options(backend.clone(), &RuntimeOptions::new().with_numerics(policy)).unwrap();
        let stream = runtime.device(0).unwrap().create_stream().unwrap();
        Self { backend, runtime, stream }
    }

    fn buffers<T: Scalar>(&self) -> [DeviceBuffer<T>; 2] {
        let device = self.runtime.device(0).unwrap();
        std::array::from_fn(|_| device.allocate(4).unwrap())
    }

    fn multiply<T: Scalar>(&self, lease: &mut BlasLease<'_>, one: T, zero: T) -> Result<Vec<HandleCall>> {
        let [a, c] = self.buffers::<T>();
        lease.gemm(&GemmShape::of::<T>(2, 2, 2), one, &a, &a, zero, &c)?;
        Ok(self.backend.take_handle_calls())
    }

    /// One 32-bit product with a lease of its own.
    fn product(&self) -> Result<Vec<HandleCall>> {
        self.multiply(&mut self.stream.blas()?, 1.0_f32, 0.0)
    }

    fn plan(&self, lease: &mut LtLease<'_>) -> Result<Vec<HandleCall>> {
        let [a, d] = self.buffers::<f32>();
        lease.matmul(&GemmShape::of::<f32>(2, 2, 2), Epilogue::None, 1.0, &a, &a, 0.0, &d, None)?;
        Ok(self.backend.take_handle_calls())
    }
}

#[test]
fn the_first_product_sets_every_mode_and_an_equal_one_sets_none() {
    let bench = Bench::new(Numerics::new());
    drop(bench.stream.blas().unwrap());
    assert_eq!(bench.backend.take_handle_calls(), [SetStream, SetWorkspace], "a lease alone sets no mode");
    let first = [SetMathMode(MathMode::Default), SetAtomicsMode(AtomicsMode::NotAllowed), Gemm(DataType::F32)];
    assert_eq!(bench.product().unwrap(), first);
    for _ in 0..3 {
        assert_eq!(bench.product().unwrap(), [Gemm(DataType::F32)]);
    }
    // Another stream binds anew; the modes stay.
    let other = bench.runtime.device(0).unwrap().create_stream().unwrap();
    let calls = bench.multiply(&mut other.blas().unwrap(), 1.0_f32, 0.0).unwrap();
    assert_eq!(calls, [SetStream, SetWorkspace, Gemm(DataType::F32)]);
}

#[test]
fn the_lease_comes_before_the_thread_and_the_thread_before_the_runtime() {
    let bench = Bench::new(TF32);
    let calls = bench.product().unwrap();
    assert!(calls.ends_with(&[
        SetMathMode(MathMode::Tf32),
        SetAtomicsMode(AtomicsMode::NotAllowed),
        Gemm(DataType::F32)
    ]));
    numerics::with(QUICK, || {
        let expected = [SetMathMode(MathMode::Default), SetAtomicsMode(AtomicsMode::Allowed), Gemm(DataType::F32)];
        assert_eq!(bench.product().unwrap(), expected);
        let mut lease = bench.stream.blas().unwrap().with_numerics(BOTH);
        assert_eq!(
            bench.multiply(&mut lease, 1.0_f32, 0.0).unwrap(),
            [SetMathMode(MathMode::Tf32), Gemm(DataType::F32)]
        );
        lease.set_numerics(Numerics::new());
        assert_eq!(
            bench.multiply(&mut lease, 1.0_f32, 0.0).unwrap(),
            [SetMathMode(MathMode::Default), SetAtomicsMode(AtomicsMode::NotAllowed), Gemm(DataType::F32)]
        );
        drop(lease);
        // The lease's policy ended with the lease.
        assert_eq!(bench.product().unwrap(), [SetAtomicsMode(AtomicsMode::Allowed), Gemm(DataType::F32)]);
    });
    assert_eq!(
        bench.product().unwrap(),
        [SetMathMode(MathMode::Tf32), SetAtomicsMode(AtomicsMode::NotAllowed), Gemm(DataType::F32)]
    );
}

#[test]
fn the_policy_of_a_thread_nests_survives_a_panic_and_stays_in_its_thread() {
    assert_eq!(numerics::of_thread(), None);
    numerics::with(TF32, || {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            numerics::with(QUICK, || {
                assert_eq!(numerics::of_thread(), Some(QUICK));
                numerics::with(BOTH, || assert_eq!(numerics::of_thread(), Some(BOTH)));
                assert_eq!(numerics::of_thread(), Some(QUICK));
                std::panic::resume_unwind(Box::new(()));
            });
        }));
        assert!(panicked.is_err());
        assert_eq!(numerics::of_thread(), Some(TF32));
        std::thread::spawn(|| assert_eq!(numerics::of_thread(), None)).join().unwrap();
    });
    assert_eq!(numerics::of_thread(), None);
}

#[test]
fn only_32_bit_products_have_a_precision() {
    let bench = Bench::new(TF32);
    let mut lease = bench.stream.blas().unwrap();
    bench.backend.take_handle_calls();
    // The modes of a fresh handle are unknown, so the first product sets them, whatever its type.
    let first = [SetMathMode(MathMode::Default), SetAtomicsMode(AtomicsMode::NotAllowed), Gemm(DataType::F64)];
    assert_eq!(bench.multiply(&mut lease, 1.0_f64, 0.0).unwrap(), first);
    assert_eq!(bench.multiply(&mut lease, 1.0_f32, 0.0).unwrap(), [SetMathMode(MathMode::Tf32), Gemm(DataType::F32)]);
    assert_eq!(bench.multiply(&mut lease, 1.0_f64, 0.0).unwrap(), [Gemm(DataType::F64)]);
    let half = highwater_hal::half::f16::from_f32;
    assert_eq!(bench.multiply(&mut lease, half(1.0), half(0.0)).unwrap(), [Gemm(DataType::F16)]);
    assert_eq!(bench.multiply(&mut lease, 1.0_f32, 0.0).unwrap(), [Gemm(DataType::F32)]);
}

#[test]
fn tf32_on_a_device_without_it_is_refused_for_32_bit_products_only() {
    let refused = |result: Result<Vec<HandleCall>>| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("tf32") && error.hint().contains("Numerics"), "{error}");
    };
    let bench = Bench::with_capabilities(TF32, |can| can.tf32 = false);
    refused(bench.product());
    refused(bench.plan(&mut bench.stream.lt().unwrap()));
    let mut lease = bench.stream.blas().unwrap();
    let calls = bench.backend.take_handle_calls();
    assert!(!calls.iter().any(|call| matches!(call, Gemm(_) | CreatePlan(..) | RunPlan(_))), "{calls:?}");
    assert_eq!(bench.multiply(&mut lease, 1.0_f64, 0.0).unwrap().last(), Some(&Gemm(DataType::F64)));
    assert_eq!(lease.with_raw(|_| ()).unwrap_err().kind(), ErrorKind::Unsupported);
    drop(lease);
    // A closer policy without TF32 is all it takes.
    numerics::with(Numerics::new(), || assert_eq!(bench.product().unwrap(), [Gemm(DataType::F32)]));
    refused(numerics::with(TF32, || bench.product()));
    refused(bench.multiply(&mut bench.stream.blas().unwrap().with_numerics(BOTH), 1.0_f32, 0.0));
}

#[test]
fn a_device_without_a_choice_of_atomics_is_not_asked_for_one() {
    let bench = Bench::with_capabilities(QUICK, |can| can.atomics_mode = false);
    drop(bench.stream.blas().unwrap());
    bench.backend.take_handle_calls();
    assert_eq!(bench.product().unwrap(), [SetMathMode(MathMode::Default), Gemm(DataType::F32)]);
    let calls = bench.plan(&mut bench.stream.lt().unwrap()).unwrap();
    assert!(calls.contains(&CreatePlan(MathMode::Default, AtomicsMode::NotAllowed)), "{calls:?}");
}

#[test]
fn a_mode_that_was_refused_is_set_again_by_the_next_product() {
    let bench = Bench::new(Numerics::new());
    bench.product().unwrap();
    bench.backend.gpu.fail_call(Operation::SetMathMode, 1, ErrorKind::Vendor).unwrap();
    numerics::with(TF32, || bench.product().unwrap_err());
    assert_eq!(bench.backend.take_handle_calls(), [SetMathMode(MathMode::Tf32)]);
    // What the handle is in after a refusal is unknown, also when the old mode is wanted.
    assert_eq!(bench.product().unwrap(), [SetMathMode(MathMode::Default), Gemm(DataType::F32)]);
}

#[test]
fn a_handle_is_lent_in_the_modes_of_the_policy_and_all_are_set_again_afterwards() {
    let bench = Bench::new(TF32);
    let mut lease = bench.stream.blas().unwrap();
    bench.backend.take_handle_calls();
    let modes = [SetMathMode(MathMode::Tf32), SetAtomicsMode(AtomicsMode::NotAllowed)];
    let lent = lease.with_raw(|_| bench.backend.take_handle_calls()).unwrap();
    assert_eq!(lent, [&modes[..], &[SetStream, SetWorkspace]].concat());
    assert_eq!(bench.backend.take_handle_calls(), [SetStream, SetWorkspace]);
    let calls = bench.multiply(&mut lease, 1.0_f32, 0.0).unwrap();
    assert_eq!(calls, [&modes[..], &[Gemm(DataType::F32)]].concat());
}

#[test]
fn foreign_products_that_change_no_setting_take_the_handle_as_it_is() {
    let bench = Bench::new(TF32);
    let mut lease = bench.stream.blas().unwrap();
    bench.backend.take_handle_calls();
    let mut calls = |policy| {
        lease.set_numerics(policy);
        // SAFETY: Nothing is done with the handle.
        let handle = unsafe { lease.enqueue_raw(|handle| handle) }.unwrap();
        (handle, bench.backend.take_handle_calls())
    };
    let (handle, first) = calls(TF32);
    assert_eq!(first, [SetMathMode(MathMode::Tf32), SetAtomicsMode(AtomicsMode::NotAllowed)]);
    assert_eq!(calls(TF32), (handle, vec![]), "a repetition sets nothing");
    assert_eq!(calls(Numerics::new()), (handle, vec![SetMathMode(MathMode::Default)]));
    assert_eq!(bench.multiply(&mut lease, 1.0_f32, 0.0).unwrap(), [Gemm(DataType::F32)], "nothing is restored");
    // After code that may have changed the handle, its settings are new.
    lease.with_raw(|_| ()).unwrap();
    bench.backend.take_handle_calls();
    // SAFETY: As above.
    unsafe { lease.enqueue_raw(|_| ()) }.unwrap();
    let modes = [SetMathMode(MathMode::Default), SetAtomicsMode(AtomicsMode::NotAllowed)];
    assert_eq!(bench.backend.take_handle_calls(), modes);
}

#[test]
fn foreign_products_of_threads_take_turns_on_a_stream() {
    let bench = Bench::new(Numerics::new());
    let (inside, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
    let enqueue = |_| {
        assert!(!inside.swap(true, Ordering::AcqRel), "two threads enqueue with one workspace");
        std::thread::yield_now();
        turns.fetch_add(1, Ordering::Relaxed);
        inside.store(false, Ordering::Release);
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut lease = bench.stream.blas().unwrap();
                // SAFETY: Nothing is done with the handle.
                (0..200).for_each(|_| unsafe { lease.enqueue_raw(enqueue) }.unwrap());
            });
        }
    });
    assert_eq!(turns.into_inner(), 800);
}

#[test]
fn plans_of_different_modes_are_different_plans_and_are_kept() {
    let bench = Bench::new(Numerics::new());
    let mut lease = bench.stream.lt().unwrap();
    bench.backend.take_handle_calls();
    let policies = [Numerics::new(), TF32, QUICK, BOTH];
    let modes = [
        (MathMode::Default, AtomicsMode::NotAllowed),
        (MathMode::Tf32, AtomicsMode::NotAllowed),
        (MathMode::Default, AtomicsMode::Allowed),
        (MathMode::Tf32, AtomicsMode::Allowed),
    ];
    let plans = policies.into_iter().zip(modes).map(|(policy, (math, atomics))| {
        lease.set_numerics(policy);
        // No mode is set on the handle: the plan has them.
        let [created, run @ RunPlan(_)] = bench.plan(&mut lease).unwrap()[..] else {
            panic!("a plan is created and run")
        };
        assert_eq!(created, CreatePlan(math, atomics));
        run
    });
    let plans: Vec<_> = plans.collect();
    for (policy, plan) in policies.into_iter().zip(plans) {
        lease.set_numerics(policy);
        assert_eq!(bench.plan(&mut lease).unwrap(), [plan]);
    }
    // A type without a choice of precision needs one plan for both.
    let [a, d] = bench.buffers::<f64>();
    let shape = GemmShape::of::<f64>(2, 2, 2);
    for policy in [Numerics::new(), TF32] {
        lease.set_numerics(policy);
        lease.matmul(&shape, Epilogue::None, 1.0, &a, &a, 0.0, &d, None).unwrap();
    }
    let created = bench.backend.take_handle_calls().iter().filter(|call| matches!(call, CreatePlan(..))).count();
    assert_eq!(created, 1);
}

#[test]
fn a_capture_binds_anew_and_sets_no_mode_that_is_set() {
    let bench = Bench::new(Numerics::new());
    bench.product().unwrap();
    let gemm = Gemm(DataType::F32);
    let math = |mode| SetMathMode(mode);
    let [a, c] = bench.buffers::<f32>();
    let product = |policy: Numerics| -> Result<Vec<HandleCall>> {
        let mut lease = bench.stream.blas()?.with_numerics(policy);
        lease.gemm(&GemmShape::of::<f32>(2, 2, 2), 1.0, &a, &a, 0.0, &c)?;
        Ok(bench.backend.take_handle_calls())
    };
    bench.backend.take_handle_calls();
    let captured = bench.stream.capture(|_| {
        assert_eq!(product(Numerics::new())?, [SetStream, SetWorkspace, gemm]);
        assert_eq!(product(TF32)?, [math(MathMode::Tf32), gemm]);
        assert_eq!(product(TF32)?, [gemm]);
        Ok(())
    });
    captured.unwrap().launch(&bench.stream).unwrap();
    assert_eq!(product(TF32).unwrap(), [SetStream, SetWorkspace, gemm]);
    assert_eq!(product(Numerics::new()).unwrap(), [math(MathMode::Default), gemm]);
}
