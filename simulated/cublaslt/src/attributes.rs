//! Descriptors and their attributes. A call whose byte count differs from the size of the attribute's type is refused.

use std::ffi::c_void;

use highwater_simulated_blas::status::INVALID_VALUE;

/// Reads an attribute's value from foreign memory.
///
/// # Safety
/// `place` must be null, or `bytes` bytes must be readable there.
unsafe fn read<T: Copy>(place: *const c_void, bytes: usize) -> Result<T, u32> {
    if place.is_null() || bytes < size_of::<T>() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: The caller upholds the contract. The types are numbers, for which every bit pattern is valid.
    Ok(unsafe { place.cast::<T>().read_unaligned() })
}

/// The object behind a `cublasLtMatmulDesc_t`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Description {
    pub(crate) compute_type: u32,
    pub(crate) scale_type: u32,
    pub(crate) pointer_mode: u32,
    pub(crate) transpose_a: u32,
    pub(crate) transpose_b: u32,
    pub(crate) epilogue: u32,
    pub(crate) bias: u64,
    pub(crate) bias_batch_stride: i64,
    /// -1: the type of D.
    pub(crate) bias_type: i32,
    /// True if an attribute was set that the kernels do not support.
    pub(crate) is_special: bool,
}

impl Description {
    pub(crate) fn new(compute_type: u32, scale_type: u32) -> Self {
        Self {
            compute_type,
            scale_type,
            pointer_mode: 0,
            transpose_a: 0,
            transpose_b: 0,
            epilogue: 1,
            bias: 0,
            bias_batch_stride: 0,
            bias_type: -1,
            is_special: false,
        }
    }

    /// # Safety
    /// The contract of [`read`].
    pub(crate) unsafe fn set(&mut self, attribute: u32, value: *const c_void, bytes: usize) -> Result<(), u32> {
        // SAFETY: The caller upholds the contract, here and below.
        unsafe {
            match attribute {
                0 => self.compute_type = read(value, bytes)?,
                1 => self.scale_type = read(value, bytes)?,
                2 => self.pointer_mode = read(value, bytes)?,
                3 => self.transpose_a = read(value, bytes)?,
                4 => self.transpose_b = read(value, bytes)?,
                7 => self.epilogue = read(value, bytes)?,
                8 => self.bias = read(value, bytes)?,
                10 => self.bias_batch_stride = read(value, bytes)?,
                26 => self.bias_type = read(value, bytes)?,
                // A hint that has no effect for these types.
                15 => _ = read::<i32>(value, bytes)?,
                25 => _ = read::<i8>(value, bytes)?,
                // Transposed C, part of C only.
                5 | 6 => self.is_special |= read::<u32>(value, bytes)? != 0,
                // Auxiliary outputs, scales of 8-bit types, synchronization by chunks. If one is set, no algorithm is found.
                11..=14 | 17..=24 | 27..=37 => self.is_special |= bytes > 0 && !value.is_null(),
                _ => return Err(INVALID_VALUE),
            }
        }
        Ok(())
    }

    /// # Safety
    /// `value` must be null, or `bytes` bytes must be writable there. `written` must be null or valid for a write. With 0 bytes
    /// only the size is written.
    pub(crate) unsafe fn get(
        &self,
        attribute: u32,
        value: *mut c_void,
        bytes: usize,
        written: *mut usize,
    ) -> Result<(), u32> {
        let four = |number: u32| (u64::from(number), 4);
        let (number, size) = match attribute {
            0 => four(self.compute_type),
            1 => four(self.scale_type),
            2 => four(self.pointer_mode),
            3 => four(self.transpose_a),
            4 => four(self.transpose_b),
            7 => four(self.epilogue),
            8 => (self.bias, 8),
            10 => (self.bias_batch_stride as u64, 8),
            26 => four(self.bias_type as u32),
            _ => return Err(INVALID_VALUE),
        };
        if !written.is_null() {
            // SAFETY: The caller upholds the contract.
            unsafe { written.write(size) };
        }
        if bytes == 0 && !written.is_null() {
            return Ok(());
        }
        if value.is_null() || bytes < size {
            return Err(INVALID_VALUE);
        }
        let number = number.to_le_bytes();
        // SAFETY: `size` bytes are writable, and the number has eight.
        unsafe { number.as_ptr().copy_to_nonoverlapping(value.cast(), size) };
        Ok(())
    }
}

/// The object behind a `cublasLtMatrixLayout_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) data_type: u32,
    /// 0: column-major.
    pub(crate) order: u32,
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    pub(crate) ld: i64,
    pub(crate) batch: i32,
    pub(crate) stride: i64,
    /// True if an attribute was set that the kernels do not support.
    pub(crate) is_special: bool,
}

impl Layout {
    pub(crate) fn new(data_type: u32, rows: u64, columns: u64, ld: i64) -> Self {
        Self { data_type, order: 0, rows, columns, ld, batch: 1, stride: 0, is_special: false }
    }

    /// # Safety
    /// The contract of [`read`].
    pub(crate) unsafe fn set(&mut self, attribute: u32, value: *const c_void, bytes: usize) -> Result<(), u32> {
        // SAFETY: The caller upholds the contract, here and below.
        unsafe {
            match attribute {
                0 => self.data_type = read(value, bytes)?,
                1 => self.order = read(value, bytes)?,
                2 => self.rows = read(value, bytes)?,
                3 => self.columns = read(value, bytes)?,
                4 => self.ld = read(value, bytes)?,
                5 => self.batch = read(value, bytes)?,
                6 => self.stride = read(value, bytes)?,
                7 => self.is_special |= read::<i64>(value, bytes)? != 0,
                8 => self.is_special |= read::<u32>(value, bytes)? != 0,
                _ => return Err(INVALID_VALUE),
            }
        }
        Ok(())
    }
}

/// The object behind a `cublasLtMatmulPreference_t`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Preference {
    pub(crate) workspace_bytes: u64,
    /// The alignments of A, B, C and D, in bytes.
    pub(crate) alignments: [u32; 4],
}

impl Default for Preference {
    fn default() -> Self {
        Self { workspace_bytes: 0, alignments: [256; 4] }
    }
}

impl Preference {
    /// Returns the preference for operands that are aligned to their elements.
    pub(crate) fn without_alignment(workspace_bytes: u64) -> Self {
        Self { workspace_bytes, alignments: [1; 4] }
    }

    /// # Safety
    /// The contract of [`read`].
    pub(crate) unsafe fn set(&mut self, attribute: u32, value: *const c_void, bytes: usize) -> Result<(), u32> {
        // SAFETY: The caller upholds the contract, here and below.
        unsafe {
            match attribute {
                1 => self.workspace_bytes = read(value, bytes)?,
                5..=8 => {
                    let alignment: u32 = read(value, bytes)?;
                    if alignment == 0 {
                        return Err(INVALID_VALUE);
                    }
                    self.alignments[attribute as usize - 5] = alignment;
                }
                // The search mode and the reduction scheme have no effect: there is one algorithm, whose sums always have the
                // same order.
                0 | 3 => _ = read::<u32>(value, bytes)?,
                9 => _ = read::<f32>(value, bytes)?,
                12 => _ = read::<u64>(value, bytes)?,
                _ => return Err(INVALID_VALUE),
            }
        }
        Ok(())
    }
}
