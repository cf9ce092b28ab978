//! Descriptors and their attributes. A call with fewer bytes than the attribute's type has is refused.

use std::ffi::c_void;

use super::Fault;

/// Reads an attribute's value from foreign memory.
///
/// # Safety
/// `place` must be null, or `bytes` bytes must be readable there.
unsafe fn read<T: Copy>(place: *const c_void, bytes: usize) -> Result<T, Fault> {
    if place.is_null() || bytes < size_of::<T>() {
        return Err(Fault::Invalid);
    }
    // SAFETY: The caller upholds the contract. The types are numbers, for which every bit pattern is valid.
    Ok(unsafe { place.cast::<T>().read_unaligned() })
}

/// An attribute of a description. Its number depends on the vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attribute {
    /// The compute type.
    ComputeType,
    /// The type of alpha and beta.
    ScaleType,
    /// The location of alpha and beta: the host or the device.
    PointerMode,
    /// The operation on A.
    TransposeA,
    /// The operation on B.
    TransposeB,
    /// The epilogue.
    Epilogue,
    /// The address of the bias.
    Bias,
    /// The distance of biases in a batch.
    BiasBatchStride,
    /// The type of the bias.
    BiasType,
    /// Four bytes that have no effect for the supported types.
    Hint,
    /// One byte that has no effect for the supported types.
    SmallHint,
    /// Four bytes that the kernels support if they are 0.
    Zero,
    /// An attribute that the kernels do not support. If it is set, the heuristic finds no algorithm.
    Special,
}

/// The object behind a `cublasLtMatmulDesc_t` or a `hipblasLtMatmulDesc_t`.
#[derive(Debug, Clone, Copy)]
pub struct Description {
    pub(super) compute_type: u32,
    pub(super) scale_type: u32,
    pub(super) pointer_mode: u32,
    pub(super) transpose_a: u32,
    pub(super) transpose_b: u32,
    pub(super) epilogue: u32,
    pub(super) bias: u64,
    pub(super) bias_batch_stride: i64,
    /// -1: the type of D.
    pub(super) bias_type: i32,
    /// True if an attribute was set that the kernels do not support.
    pub(super) is_special: bool,
}

impl Description {
    /// Returns a description whose operations are `plain`.
    #[must_use]
    pub fn new(compute_type: u32, scale_type: u32, plain: u32) -> Self {
        Self {
            compute_type,
            scale_type,
            pointer_mode: 0,
            transpose_a: plain,
            transpose_b: plain,
            epilogue: 1,
            bias: 0,
            bias_batch_stride: 0,
            bias_type: -1,
            is_special: false,
        }
    }

    /// Returns the compute type in the vendor's numbers.
    #[must_use]
    pub fn compute_type(&self) -> u32 {
        self.compute_type
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// A value with fewer bytes than the attribute's type.
    ///
    /// # Safety
    /// `value` must be null, or `bytes` bytes must be readable there.
    pub unsafe fn set(&mut self, attribute: Attribute, value: *const c_void, bytes: usize) -> Result<(), Fault> {
        // SAFETY: The caller upholds the contract, here and below.
        unsafe {
            match attribute {
                Attribute::ComputeType => self.compute_type = read(value, bytes)?,
                Attribute::ScaleType => self.scale_type = read(value, bytes)?,
                Attribute::PointerMode => self.pointer_mode = read(value, bytes)?,
                Attribute::TransposeA => self.transpose_a = read(value, bytes)?,
                Attribute::TransposeB => self.transpose_b = read(value, bytes)?,
                Attribute::Epilogue => self.epilogue = read(value, bytes)?,
                Attribute::Bias => self.bias = read(value, bytes)?,
                Attribute::BiasBatchStride => self.bias_batch_stride = read(value, bytes)?,
                Attribute::BiasType => self.bias_type = read(value, bytes)?,
                Attribute::Hint => _ = read::<i32>(value, bytes)?,
                Attribute::SmallHint => _ = read::<i8>(value, bytes)?,
                Attribute::Zero => self.is_special |= read::<u32>(value, bytes)? != 0,
                Attribute::Special => self.is_special |= bytes > 0 && !value.is_null(),
            }
        }
        Ok(())
    }

    /// Returns the value and the bytes of an attribute.
    ///
    /// # Errors
    /// An attribute that cannot be read.
    pub fn get(&self, attribute: Attribute) -> Result<(u64, usize), Fault> {
        let four = |number: u32| (u64::from(number), 4);
        Ok(match attribute {
            Attribute::ComputeType => four(self.compute_type),
            Attribute::ScaleType => four(self.scale_type),
            Attribute::PointerMode => four(self.pointer_mode),
            Attribute::TransposeA => four(self.transpose_a),
            Attribute::TransposeB => four(self.transpose_b),
            Attribute::Epilogue => four(self.epilogue),
            Attribute::Bias => (self.bias, 8),
            Attribute::BiasBatchStride => (self.bias_batch_stride as u64, 8),
            Attribute::BiasType => four(self.bias_type as u32),
            _ => return Err(Fault::Invalid),
        })
    }
}

/// Writes a value and its size to the addresses of a call. With 0 bytes, writes only the size.
///
/// # Errors
/// The value needs more bytes.
///
/// # Safety
/// `value` must be null, or `bytes` bytes must be writable there. `written` must be null or valid for a write.
pub unsafe fn write(
    (number, size): (u64, usize),
    value: *mut c_void,
    bytes: usize,
    written: *mut usize,
) -> Result<(), Fault> {
    if !written.is_null() {
        // SAFETY: The caller upholds the contract.
        unsafe { written.write(size) };
    }
    if bytes == 0 && !written.is_null() {
        return Ok(());
    }
    if value.is_null() || bytes < size {
        return Err(Fault::Invalid);
    }
    let number = number.to_le_bytes();
    // SAFETY: `size` bytes are writable, and the number has eight.
    unsafe { number.as_ptr().copy_to_nonoverlapping(value.cast(), size) };
    Ok(())
}

/// An attribute of a layout. Its number depends on the vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayoutAttribute {
    /// The element type.
    Type,
    /// The order of elements.
    Order,
    /// Rows.
    Rows,
    /// Columns.
    Columns,
    /// The leading dimension.
    Ld,
    /// The matrices in a batch.
    Batch,
    /// The distance of matrices in a batch.
    Stride,
    /// Eight bytes that the kernels support if they are 0.
    Zero,
    /// Four bytes that the kernels support if they are 0.
    SmallZero,
}

/// The object behind a `cublasLtMatrixLayout_t` or a `hipblasLtMatrixLayout_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub(super) data_type: u32,
    /// 0: column-major.
    pub(super) order: u32,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) ld: i64,
    pub(super) batch: i32,
    pub(super) stride: i64,
    /// True if an attribute was set that the kernels do not support.
    pub(super) is_special: bool,
}

impl Layout {
    /// Returns the layout of one matrix.
    #[must_use]
    pub fn new(data_type: u32, rows: u64, columns: u64, ld: i64) -> Self {
        Self { data_type, order: 0, rows, columns, ld, batch: 1, stride: 0, is_special: false }
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// A value with fewer bytes than the attribute's type.
    ///
    /// # Safety
    /// `value` must be null, or `bytes` bytes must be readable there.
    pub unsafe fn set(&mut self, attribute: LayoutAttribute, value: *const c_void, bytes: usize) -> Result<(), Fault> {
        // SAFETY: The caller upholds the contract, here and below.
        unsafe {
            match attribute {
                LayoutAttribute::Type => self.data_type = read(value, bytes)?,
                LayoutAttribute::Order => self.order = read(value, bytes)?,
                LayoutAttribute::Rows => self.rows = read(value, bytes)?,
                LayoutAttribute::Columns => self.columns = read(value, bytes)?,
                LayoutAttribute::Ld => self.ld = read(value, bytes)?,
                LayoutAttribute::Batch => self.batch = read(value, bytes)?,
                LayoutAttribute::Stride => self.stride = read(value, bytes)?,
                LayoutAttribute::Zero => self.is_special |= read::<i64>(value, bytes)? != 0,
                LayoutAttribute::SmallZero => self.is_special |= read::<u32>(value, bytes)? != 0,
            }
        }
        Ok(())
    }
}

/// An attribute of a preference. Its number depends on the vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreferenceAttribute {
    /// The most bytes of workspace.
    Workspace,
    /// The alignment of A, B, C or D, by index.
    Alignment(usize),
    /// A value of this number of bytes, without effect. The one algorithm always adds in the same order.
    Hint(usize),
}

/// The object behind a `cublasLtMatmulPreference_t` or a `hipblasLtMatmulPreference_t`.
#[derive(Debug, Clone, Copy)]
pub struct Preference {
    /// The most bytes of workspace.
    pub workspace_bytes: u64,
    /// The alignments of A, B, C and D, in bytes.
    pub alignments: [u32; 4],
}

impl Default for Preference {
    fn default() -> Self {
        Self { workspace_bytes: 0, alignments: [256; 4] }
    }
}

impl Preference {
    /// Returns the preference for operands that are aligned to their elements.
    #[must_use]
    pub fn without_alignment(workspace_bytes: u64) -> Self {
        Self { workspace_bytes, alignments: [1; 4] }
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// A value with fewer bytes than the attribute's type, or an alignment of 0.
    ///
    /// # Safety
    /// `value` must be null, or `bytes` bytes must be readable there.
    pub unsafe fn set(
        &mut self,
        attribute: PreferenceAttribute,
        value: *const c_void,
        bytes: usize,
    ) -> Result<(), Fault> {
        match attribute {
            // SAFETY: The caller upholds the contract, here and below.
            PreferenceAttribute::Workspace => self.workspace_bytes = unsafe { read(value, bytes) }?,
            PreferenceAttribute::Alignment(operand) => {
                // SAFETY: As above.
                let alignment: u32 = unsafe { read(value, bytes) }?;
                if alignment == 0 {
                    return Err(Fault::Invalid);
                }
                self.alignments[operand] = alignment;
            }
            PreferenceAttribute::Hint(size) if value.is_null() || bytes < size => return Err(Fault::Invalid),
            PreferenceAttribute::Hint(_) => {}
        }
        Ok(())
    }
}
