//! Capabilities as data: the abilities and the behavior of a device. Core reads a table, never the vendor's name.

use crate::blas::{DataType, GemmShape};
use crate::error::{Error, ErrorKind, Result};
use crate::ipc::Transports;

/// The abilities of a device, and the facts about its behavior.
///
/// - An ability is a `bool` named for a request. If it is false, the request returns
///   [`Unsupported`](crate::ErrorKind::Unsupported) before the vendor is called.
/// - A fact states a behavior of the vendor. Core adapts to it.
///
/// The struct is flat and `Copy`. Core reads it once for each runtime, and never on a hot path.
///
/// A backend starts from [`Capabilities::none`], which promises nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    // ---- abilities
    /// GEMM on 32-bit floats.
    pub gemm_f32: bool,
    /// GEMM on 64-bit floats.
    pub gemm_f64: bool,
    /// GEMM on IEEE half precision, with sums in 32 bits.
    pub gemm_f16: bool,
    /// GEMM on bfloat16, with sums in 32 bits.
    pub gemm_bf16: bool,
    /// GEMM and plans with 16-bit factors and a 32-bit result: F16 to F32 if `gemm_f16` holds, Bf16 to F32 if `gemm_bf16`
    /// holds.
    pub gemm_mixed: bool,
    /// [`MathMode::Tf32`](crate::MathMode) on 32-bit GEMM.
    pub tf32: bool,
    /// A choice of [`AtomicsMode`](crate::AtomicsMode).
    pub atomics_mode: bool,
    /// Workspaces for BLAS handles, which hipBLAS 2 lacks.
    pub blas_workspace: bool,
    /// Strided-batched GEMM.
    pub strided_batch: bool,
    /// Handles of kind [`Lt`](crate::BlasKind::Lt): plans with epilogues.
    pub lt_plans: bool,
    /// Stream capture and graph replay.
    pub capture: bool,
    /// Device memory allocated and freed in stream order.
    pub stream_ordered_memory: bool,
    /// Device memory that other processes can open.
    pub shareable_memory: bool,
    /// Events that other processes can open.
    pub interprocess_events: bool,
    /// The elapsed time between two events.
    pub event_timing: bool,
    /// Streams of low and high priority.
    pub stream_priority: bool,
    /// Direct copies between devices.
    pub peer_copy: bool,
    /// Page-locking of memory that other code allocated.
    pub host_register: bool,
    /// Page-locking of memory that the CPU may only read; needs `host_register`.
    pub host_register_read_only: bool,
    /// Write-combined page-locked memory.
    pub write_combined: bool,
    /// The legacy default stream.
    pub legacy_default_stream: bool,
    /// The per-thread default stream.
    pub per_thread_default_stream: bool,
    /// Wrapping of streams and events that other code made.
    pub foreign_objects: bool,
    /// Description and export of device memory that other code allocated, with
    /// [`describe_memory`](crate::Backend::describe_memory).
    pub foreign_memory: bool,
    /// Physical memory that is mapped at reserved addresses.
    pub mapped_memory: bool,
    /// Mapped memory that other devices of the machine, such as network adapters, access directly.
    pub mapped_memory_rdma: bool,

    // ---- facts
    /// Binding a stream returns a BLAS handle to its default workspace (cuBLAS: always; hipBLAS: never).
    pub set_stream_resets_workspace: bool,
    /// A handle must keep its first stream (hipBLAS 2).
    pub handle_per_stream: bool,
    /// A handle for Lt plans must keep its first stream (hipBLASLt).
    pub lt_handle_per_stream: bool,
    /// Handles, events and memory may be created while a capture is open.
    pub create_during_capture: bool,
    /// Page-locked memory has the same address on the device as on the host.
    pub host_address_is_device_address: bool,
    /// The default kind of page-locked memory is cached by the device.
    pub pinned_cached_by_device: bool,
    /// A stream's wait for an event of another process ends when that process ends, even before the event was reached. If
    /// false, such a wait may never end.
    pub event_waits_end_with_peer: bool,
    /// Maximum bytes of one registration of the page-locked memory that core makes; needs `host_register`. With 0, the
    /// backend's own allocation provides all of it. Core rounds this fact up to huge pages of 2 MiB, registers at most 64 MiB
    /// at once except for a request that must not be divided, and cuts its copies at the borders, because no copy may cross from one registration into another.
    pub register_piece_bytes: usize,
    /// Transports that share this device's memory with another process.
    pub ipc_transports: Transports,
    /// Bytes of which the sizes and the addresses of mapped memory are multiples, if `mapped_memory` holds; else 0.
    pub mapped_memory_granularity: usize,
    /// Alignment in bytes of a BLAS workspace.
    pub workspace_alignment: usize,
    /// Bytes of workspace at which a BLAS handle is fastest on this device.
    pub blas_workspace_bytes: usize,
    /// Bytes of workspace that an Lt plan may use by default.
    pub lt_workspace_bytes: usize,
}

impl Capabilities {
    /// Returns no ability, and the facts that demand the most care of core.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            gemm_f32: false,
            gemm_f64: false,
            gemm_f16: false,
            gemm_bf16: false,
            gemm_mixed: false,
            tf32: false,
            atomics_mode: false,
            blas_workspace: false,
            strided_batch: false,
            lt_plans: false,
            capture: false,
            stream_ordered_memory: false,
            shareable_memory: false,
            interprocess_events: false,
            event_timing: false,
            stream_priority: false,
            peer_copy: false,
            host_register: false,
            host_register_read_only: false,
            write_combined: false,
            legacy_default_stream: false,
            per_thread_default_stream: false,
            foreign_objects: false,
            foreign_memory: false,
            mapped_memory: false,
            mapped_memory_rdma: false,
            set_stream_resets_workspace: true,
            handle_per_stream: false,
            lt_handle_per_stream: false,
            create_during_capture: false,
            host_address_is_device_address: false,
            pinned_cached_by_device: false,
            event_waits_end_with_peer: false,
            register_piece_bytes: 0,
            ipc_transports: Transports::NONE,
            mapped_memory_granularity: 0,
            workspace_alignment: 256,
            blas_workspace_bytes: 0,
            lt_workspace_bytes: 0,
        }
    }

    /// Checks that the device supports the types and the batch of `shape`.
    ///
    /// # Errors
    /// `Unsupported` for types, pairs of types and batches that the device lacks, and for pairs that no device has. The
    /// result has the type of the factors, or `F32` if those are `F16` or `Bf16`.
    #[inline]
    pub fn check_product(&self, operation: &'static str, shape: &GemmShape) -> Result<()> {
        let can = self.can_multiply(shape.data_type, shape.output, shape.batch.is_some());
        if can { Ok(()) } else { self.explain_product(operation, shape) }
    }

    /// Returns whether the device multiplies matrices of these types.
    const fn can_multiply(&self, factors: DataType, result: DataType, batched: bool) -> bool {
        let known = match factors {
            DataType::F32 => self.gemm_f32,
            DataType::F64 => self.gemm_f64,
            DataType::F16 => self.gemm_f16,
            DataType::Bf16 => self.gemm_bf16,
        };
        let pair = match (factors, result) {
            (DataType::F16, DataType::F16)
            | (DataType::Bf16, DataType::Bf16)
            | (DataType::F32, DataType::F32)
            | (DataType::F64, DataType::F64) => true,
            (DataType::F16 | DataType::Bf16, DataType::F32) => self.gemm_mixed,
            _ => false,
        };
        known && pair && (!batched || self.strided_batch)
    }

    #[cold]
    fn explain_product(&self, operation: &'static str, shape: &GemmShape) -> Result<()> {
        let (able, name) = match shape.data_type {
            DataType::F32 => (self.gemm_f32, "gemm_f32"),
            DataType::F64 => (self.gemm_f64, "gemm_f64"),
            DataType::F16 => (self.gemm_f16, "gemm_f16"),
            DataType::Bf16 => (self.gemm_bf16, "gemm_bf16"),
        };
        if !able {
            return Err(Error::lacks(operation, name));
        }
        if shape.is_mixed() {
            if !matches!((shape.data_type, shape.output), (DataType::F16 | DataType::Bf16, DataType::F32)) {
                return Err(no_such_pair(operation, shape));
            }
            if !self.gemm_mixed {
                return Err(Error::lacks(operation, "gemm_mixed"));
            }
        }
        if shape.batch.is_some() && !self.strided_batch {
            return Err(Error::lacks(operation, "strided_batch"));
        }
        Ok(())
    }
}

/// The products that a device computes, as the bits of one word.
///
/// Every product is compared with it. The vendor's call evicts code and branch history from the processor's caches, so a
/// word is cheaper than a chain of conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Products(u32);

impl Products {
    /// Returns the products that a device with these capabilities computes.
    #[must_use]
    pub const fn of(capabilities: &Capabilities) -> Self {
        const TYPES: [DataType; 4] = [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64];
        let (mut bits, mut pair) = (0, 0);
        while pair < 16 {
            let (factors, result) = (TYPES[pair / 4], TYPES[pair % 4]);
            bits |= (capabilities.can_multiply(factors, result, false) as u32) << Self::bit(factors, result, false);
            bits |= (capabilities.can_multiply(factors, result, true) as u32) << Self::bit(factors, result, true);
            pair += 1;
        }
        Self(bits)
    }

    const fn bit(factors: DataType, result: DataType, batched: bool) -> u32 {
        (batched as u32) << 4 | (factors as u32) << 2 | result as u32
    }

    /// Returns true if the device computes products of this shape.
    #[inline(always)]
    pub const fn include(self, shape: &GemmShape) -> bool {
        self.0 >> Self::bit(shape.data_type, shape.output, shape.batch.is_some()) & 1 != 0
    }
}

#[cold]
fn no_such_pair(operation: &'static str, shape: &GemmShape) -> Error {
    let message = format!("no product has factors of {:?} and a result of {:?}", shape.data_type, shape.output);
    Error::new(ErrorKind::Unsupported, operation, message)
        .with_hint("use a result of the factors' type, or one of F32 with factors of F16 or Bf16")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_types_is_allowed_or_refused_by_name() {
        const TYPES: [DataType; 4] = [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64];
        let mut every = Capabilities::none();
        (every.gemm_f16, every.gemm_bf16, every.gemm_f32, every.gemm_f64) = (true, true, true, true);
        let mut mixed = every;
        mixed.gemm_mixed = true;
        let refusal = |capabilities: &Capabilities, factor: DataType, result: DataType| {
            let shape = GemmShape::new(factor, 2, 2, 2).with_output(result);
            capabilities.check_product("t", &shape).err().map(|error| {
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                error.to_string()
            })
        };
        for factor in TYPES {
            for result in TYPES {
                let widened = factor.bytes() == 2 && result == DataType::F32;
                let (with, without) = (refusal(&mixed, factor, result), refusal(&every, factor, result));
                if factor == result {
                    assert_eq!((with, without), (None, None), "{factor:?}");
                } else if widened {
                    assert_eq!(with, None, "{factor:?} to {result:?}");
                    assert!(without.unwrap().contains("gemm_mixed"), "{factor:?} to {result:?}");
                } else {
                    let expected = format!("no product has factors of {factor:?} and a result of {result:?}");
                    assert!(with.unwrap().contains(&expected) && without.unwrap().contains(&expected));
                }
            }
        }
        mixed.gemm_bf16 = false;
        assert!(refusal(&mixed, DataType::Bf16, DataType::F32).unwrap().contains("gemm_bf16"));
    }
}
