//! How products are computed: with TF32 or in full precision, repeatable bit for bit or not.
//!
//! A policy can be set for a runtime ([`RuntimeOptions::with_numerics`](crate::RuntimeOptions::with_numerics)), for what a
//! thread does within a closure ([`with`]), and for a lease
//! ([`BlasLease::set_numerics`](crate::BlasLease::set_numerics), [`LtLease::set_numerics`](crate::LtLease::set_numerics)).
//! The closest one counts, whole: the lease's, else the thread's, else the runtime's. Settings of different levels are not
//! mixed, so what a product does can be read off one place.
//!
//! The policy is applied by the product and not by the lease: a pooled handle remembers the modes that are set on it, and
//! the vendor is called only where they change.
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

use highwater_hal::{AtomicsMode, BlasHandle, Capabilities, DataType, Error, MathMode, Result};

/// A policy for products. By default in full precision and repeatable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Numerics {
    /// Whether the factors of 32-bit products are rounded to TF32, which is several times faster. On a device without the
    /// capability `tf32` a 32-bit product then gives `Unsupported`; products of other types are not concerned.
    pub tf32: bool,
    /// Whether equal calls give equal bits. `false` allows kernels that add with atomics, where the device has the
    /// capability `atomics_mode`; elsewhere it changes nothing.
    pub deterministic: bool,
}

impl Default for Numerics {
    fn default() -> Self {
        Self::new()
    }
}

impl Numerics {
    /// Full precision, repeatable.
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

    /// The same with or without TF32.
    #[must_use]
    #[deprecated(since = "0.2.0", note = "use `allow_tf32()`, or set the field `tf32`")]
    pub const fn with_tf32(mut self, tf32: bool) -> Self {
        self.tf32 = tf32;
        self
    }

    /// The same, repeatable or not.
    #[must_use]
    #[deprecated(since = "0.2.0", note = "use `allow_nondeterminism()`, or set the field `deterministic`")]
    pub const fn with_deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = deterministic;
        self
    }

    /// The precision for a product of `data_type`, which only 32-bit products have a choice of.
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
                "the lease, the thread or the runtime asks for TF32 (`Numerics`): leave it out for this device",
            )),
        }
    }

    /// Whether kernels may add with atomics; `None` where the device leaves no choice.
    pub(crate) fn atomics_mode(self, capabilities: &Capabilities) -> Option<AtomicsMode> {
        let mode = if self.deterministic { AtomicsMode::NotAllowed } else { AtomicsMode::Allowed };
        capabilities.atomics_mode.then_some(mode)
    }
}

thread_local! {
    // No destructor, so it can be asked at any time in the life of a thread.
    static OF_THREAD: Cell<Option<Numerics>> = const { Cell::new(None) };
}

/// Runs `run` with a policy for the products of this thread, on whichever runtime. Afterwards, also after a panic, the
/// policy before counts again. A lease that was given a policy of its own keeps to that.
pub fn with<R>(policy: Numerics, run: impl FnOnce() -> R) -> R {
    struct Restore(Option<Numerics>);
    impl Drop for Restore {
        fn drop(&mut self) {
            OF_THREAD.set(self.0);
        }
    }
    let _restore = Restore(OF_THREAD.replace(Some(policy)));
    run()
}

/// The policy that [`with`] has set for this thread, if any: the innermost.
#[must_use]
#[inline]
pub fn of_thread() -> Option<Numerics> {
    OF_THREAD.get()
}

/// The modes that are set on a handle, as far as they are known.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Modes {
    math: Option<MathMode>,
    atomics: Option<AtomicsMode>,
    /// The policy and the products that they were found to suit last.
    suited: Option<(Numerics, DataType)>,
}

impl Modes {
    /// Whether they are known to be what a product of `data_type` wants.
    #[inline(always)]
    pub(crate) fn suit(&self, policy: Numerics, data_type: DataType) -> bool {
        self.suited == Some((policy, data_type))
    }

    /// Sets on `handle` what a product of `data_type` wants and is not set yet.
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
        // Only 32-bit products depend on the precision: the others take the handle as it stands.
        let math = if data_type == DataType::F32 { math } else { self.math.unwrap_or(math) };
        let atomics = policy.atomics_mode(capabilities).or(self.atomics);
        self.suited = None;
        self.change(handle, math, atomics)?;
        self.suited = Some((policy, data_type));
        Ok(())
    }

    /// What fails leaves the mode unknown.
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
