//! The policy for products: TF32 or full precision, repeatable bit for bit or not.
//!
//! A policy applies to a runtime ([`RuntimeOptions::with_numerics`](crate::RuntimeOptions::with_numerics)), to a thread
//! within a closure ([`with`]), to a lease ([`BlasLease::set_numerics`](crate::BlasLease::set_numerics),
//! [`LtLease::set_numerics`](crate::LtLease::set_numerics)), or to one product
//! ([`Matmul::numerics`](crate::Matmul::numerics)). The innermost policy replaces the outer ones entirely, so one place
//! says what a product does.
//!
//! The product applies the policy, not the lease: a pooled handle remembers its modes, and the vendor is called only if they
//! change.
//!
//! ```
//! use highwater_core::{Numerics, Runtime, RuntimeOptions, numerics};
//! use highwater_mock::{MockGpu, MockOptions};
//!
//! let options = RuntimeOptions::new().with_numerics(Numerics::new().allow_nondeterminism());
//! let runtime = Runtime::with_options(MockGpu::open(MockOptions::new())?, &options)?;
//! let quick = Numerics::new().allow_tf32();
//! assert_eq!(numerics::of_thread(), None);
//! numerics::with(quick, || assert_eq!(numerics::of_thread(), Some(quick)));
//! assert_eq!(numerics::of_thread(), None);
//! # drop(runtime);
//! # Ok::<(), highwater_core::Error>(())
//! ```

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use highwater_hal::{AtomicsMode, BlasHandle, Capabilities, DataType, Error, MathMode, Result};

/// A policy for products. The default is full precision and repeatable results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Numerics {
    /// Whether the factors of 32-bit products are rounded to TF32, which is several times faster. On a device without the
    /// capability `tf32`, a 32-bit product then returns `Unsupported`. Products of other types ignore it.
    pub tf32: bool,
    /// Whether equal calls give equal bits. `false` allows kernels that add with atomics, if the device has the capability
    /// `atomics_mode`. Other devices ignore it.
    pub deterministic: bool,
}

impl Default for Numerics {
    fn default() -> Self {
        Self::new()
    }
}

impl Numerics {
    /// Returns the default: full precision, repeatable.
    #[must_use]
    pub const fn new() -> Self {
        Self { tf32: false, deterministic: true }
    }

    /// Rounds the factors of 32-bit products to TF32.
    #[must_use]
    pub const fn allow_tf32(mut self) -> Self {
        self.tf32 = true;
        self
    }

    /// Allows kernels whose results differ from run to run in the last bits.
    #[must_use]
    pub const fn allow_nondeterminism(mut self) -> Self {
        self.deterministic = false;
        self
    }

    /// Sets whether TF32 is allowed.
    #[must_use]
    #[deprecated(since = "0.2.0", note = "use `allow_tf32()`, or set the field `tf32`")]
    pub const fn with_tf32(mut self, tf32: bool) -> Self {
        self.tf32 = tf32;
        self
    }

    /// Sets whether results are repeatable.
    #[must_use]
    #[deprecated(since = "0.2.0", note = "use `allow_nondeterminism()`, or set the field `deterministic`")]
    pub const fn with_deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = deterministic;
        self
    }

    /// Returns the precision for a product of `data_type`. Only 32-bit products have a choice.
    pub(crate) fn math_mode(
        self,
        operation: &'static str,
        capabilities: &Capabilities,
        data_type: DataType,
    ) -> Result<MathMode> {
        match (self.tf32 && data_type == DataType::F32, capabilities.tf32) {
            (false, _) => Ok(MathMode::Default),
            (true, true) => Ok(MathMode::Tf32),
            (true, false) => Err(Error::lacks(operation, "tf32").with_hint(
                "the product, the lease, the thread or the runtime allows TF32 (`Numerics`): allow it only if the device's \
                 `capabilities().tf32` is true",
            )),
        }
    }

    /// Returns whether kernels may add with atomics; `None` if the device leaves no choice.
    pub(crate) fn atomics_mode(self, capabilities: &Capabilities) -> Option<AtomicsMode> {
        let mode = if self.deterministic { AtomicsMode::NotAllowed } else { AtomicsMode::Allowed };
        capabilities.atomics_mode.then_some(mode)
    }
}

/// True once any thread has called [`with`]. Until then no product reads a thread-local variable for the policy. Such an access is a
/// call in a shared library. Relaxed: a thread finds its own policy after its own store.
static IS_USED: AtomicBool = AtomicBool::new(false);

thread_local! {
    // No destructor, so it can be read at any time in the life of a thread.
    static OF_THREAD: Cell<Option<Numerics>> = const { Cell::new(None) };
}

/// Runs `run` with a policy for the products of this thread, on every runtime. Afterward, even after a panic, the previous
/// policy applies again. A lease with a policy of its own keeps it.
pub fn with<R>(policy: Numerics, run: impl FnOnce() -> R) -> R {
    struct Restore(Option<Numerics>);
    impl Drop for Restore {
        fn drop(&mut self) {
            OF_THREAD.set(self.0);
        }
    }
    IS_USED.store(true, Ordering::Relaxed);
    let _restore = Restore(OF_THREAD.replace(Some(policy)));
    run()
}

/// Returns the innermost policy that [`with`] has set for this thread.
#[must_use]
#[inline]
pub fn of_thread() -> Option<Numerics> {
    if IS_USED.load(Ordering::Relaxed) { OF_THREAD.get() } else { None }
}

/// The modes of a handle, as far as they are known.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Modes {
    math: Option<MathMode>,
    atomics: Option<AtomicsMode>,
    /// The policy and the type of product that they last suited.
    suited: Option<(Numerics, DataType)>,
}

impl Modes {
    /// Returns whether the modes suit a product of `data_type`.
    #[inline(always)]
    pub(crate) fn suit(&self, policy: Numerics, data_type: DataType) -> bool {
        self.suited == Some((policy, data_type))
    }

    /// Sets the modes on `handle` that a product of `data_type` needs and that are not set yet.
    #[inline(never)]
    pub(crate) fn apply(
        &mut self,
        handle: &mut dyn BlasHandle,
        operation: &'static str,
        policy: Numerics,
        capabilities: &Capabilities,
        data_type: DataType,
    ) -> Result<()> {
        let math = policy.math_mode(operation, capabilities, data_type)?;
        // Only 32-bit products depend on the precision. Others leave the handle as it is.
        let math = if data_type == DataType::F32 { math } else { self.math.unwrap_or(math) };
        let atomics = policy.atomics_mode(capabilities).or(self.atomics);
        self.suited = None;
        self.change(handle, math, atomics)?;
        self.suited = Some((policy, data_type));
        Ok(())
    }

    /// Sets the modes. A failure leaves the mode unknown.
    fn change(&mut self, handle: &mut dyn BlasHandle, math: MathMode, atomics: Option<AtomicsMode>) -> Result<()> {
        if self.math != Some(math) {
            self.math = None;
            handle.set_math_mode(math)?;
            self.math = Some(math);
        }
        if let Some(mode) = atomics.filter(|_| self.atomics != atomics) {
            self.atomics = None;
            handle.set_atomics_mode(mode)?;
            self.atomics = atomics;
        }
        Ok(())
    }
}
