//! The kernels of a product, on private buffers: read from device memory, multiply, write back.
//!
//! A product is two commands. *Multiply* leaves `op(A) * op(B)` in the workspace. *Finish* takes it from there, scales
//! it, adds the old C, applies the epilogue and writes the result. Between the two, the intermediate result lies in
//! ordinary device memory, so another write to the workspace spoils it, as on hardware. A product that is larger than
//! its workspace is cut into panels, with two commands each.
//!
//! Half types are widened to 32 bits, multiplied and added there, and rounded once, when the result is written. TF32
//! rounds the factors before they are multiplied, and nothing else.
//!
//! Equal calls give equal bits: the order of every sum depends only on the shape and the size of the workspace. If
//! atomics are allowed, a sum over a long k has parts that are added in another order each time. That exposes code that
//! promises repeatable results and forgets the setting.

use std::hash::{BuildHasher, RandomState};
use std::ops::{Add, AddAssign, Mul};
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use highwater_hal::{DataType, DevicePtr, Epilogue, GemmShape, StridedBatch, Transpose};

use crate::device::Device;
use crate::device_memory::DeviceMemory;

/// The part of a product that one pair of commands computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Panel {
    /// The first product of the batch, and their number.
    pub(crate) batch: usize,
    pub(crate) batches: usize,
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) column: usize,
    pub(crate) columns: usize,
}

/// Cuts a nonempty product into panels of at most `capacity` elements, which is at least 1.
pub(crate) fn panels(shape: &GemmShape, capacity: usize) -> impl Iterator<Item = Panel> + use<> {
    let (m, n, count) = (shape.m, shape.n, shape.batch_count());
    let one = m * n;
    let batches = (capacity / one).clamp(1, count);
    let rows = m.min(capacity);
    let columns = (capacity / rows).clamp(1, n);
    (0..count).step_by(batches).flat_map(move |batch| {
        (0..n).step_by(columns).flat_map(move |column| {
            (0..m).step_by(rows).map(move |row| Panel {
                batch,
                batches: batches.min(count - batch),
                row,
                rows: rows.min(m - row),
                column,
                columns: columns.min(n - column),
            })
        })
    })
}

/// A workspace that belongs to a handle. Products that use it hold it, and the last one to end gives it back.
#[derive(Debug)]
pub(crate) struct OwnWorkspace {
    pub(crate) device: Arc<Device>,
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: usize,
}

impl Drop for OwnWorkspace {
    fn drop(&mut self) {
        self.device.free_own(self.ptr, self.bytes as u64);
    }
}

/// A factor of a product, checked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Factor {
    Value(f64),
    /// Read from the device's memory when the result is written.
    At {
        offset: usize,
        data_type: DataType,
    },
}

impl Factor {
    fn read(self, memory: &DeviceMemory) -> f64 {
        fn one<T: Element>(memory: &DeviceMemory, offset: usize) -> f64 {
            let mut value = [T::zeroed()];
            memory.read_slice(offset, &mut value);
            value[0].widen().to_f64()
        }
        match self {
            Self::Value(value) => value,
            Self::At { offset, data_type } => match data_type {
                DataType::F64 => one::<f64>(memory, offset),
                DataType::F16 => one::<half::f16>(memory, offset),
                DataType::Bf16 => one::<half::bf16>(memory, offset),
                _ => one::<f32>(memory, offset),
            },
        }
    }

    /// Returns whether the factor is 0, whatever is executed before the result is written.
    pub(crate) fn is_zero(self) -> bool {
        self == Self::Value(0.0)
    }
}

/// One product, checked: the offsets of its matrices in the device's memory, in bytes.
#[derive(Debug)]
pub(crate) struct Product {
    pub(crate) device: u32,
    /// Includes the element types. The sums of C and D are as wide as those of A and B.
    pub(crate) shape: GemmShape,
    pub(crate) alpha: Factor,
    pub(crate) beta: Factor,
    pub(crate) a: usize,
    pub(crate) b: usize,
    pub(crate) c: usize,
    pub(crate) d: usize,
    /// Leading dimension of D, and the distance of one D to the next, in elements.
    pub(crate) ldd: usize,
    pub(crate) stride_d: usize,
    /// Whether D takes the place of C.
    pub(crate) in_place: bool,
    /// The offset and the element type, whose sums are as wide as those of the result.
    pub(crate) bias: Option<(usize, DataType)>,
    pub(crate) epilogue: Epilogue,
    /// Whether the factors are rounded to TF32.
    pub(crate) tf32: bool,
    /// Whether the order of sums is free.
    pub(crate) atomics: bool,
    pub(crate) workspace: usize,
    /// Holds the workspace until the last command has run, if it is the handle's own.
    pub(crate) own: Option<Arc<OwnWorkspace>>,
}

/// A type of sums. The workspace holds it, whatever the elements are.
trait Accumulator: Pod + Add<Output = Self> + AddAssign + Mul<Output = Self> + PartialOrd {
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;

    /// Returns the nearest value with a mantissa of 10 bits. Products of 64 bits have no such mode.
    fn round_to_tf32(self) -> Self {
        self
    }

    /// The function for `C = alpha * A * B + beta * C` on unchecked pointers.
    const GEMM: UncheckedGemm<Self>;

    /// Computes `c = a * b` with c column-major and packed. Strides count elements.
    #[expect(clippy::too_many_arguments, reason = "the argument list of every GEMM")]
    fn multiply(
        m: usize,
        k: usize,
        n: usize,
        a: &[Self],
        a_strides: Strides,
        b: &[Self],
        b_strides: Strides,
        c: &mut [Self],
    ) {
        let reaches = |rows: usize, columns: usize, strides: Strides| {
            (rows - 1) * strides.row + (columns - 1) * strides.column + 1
        };
        assert!(m > 0 && k > 0 && n > 0 && reaches(m, k, a_strides) <= a.len() && reaches(k, n, b_strides) <= b.len());
        assert!(m * n <= c.len());
        // SAFETY: the sizes were just checked against the slices, and `c` is borrowed exclusively. Strides are below the
        // lengths of slices, so they fit `isize`.
        unsafe {
            (Self::GEMM)(
                m,
                k,
                n,
                Self::from_f64(1.0),
                a.as_ptr(),
                a_strides.row as isize,
                a_strides.column as isize,
                b.as_ptr(),
                b_strides.row as isize,
                b_strides.column as isize,
                Self::from_f64(0.0),
                c.as_mut_ptr(),
                1,
                m as isize,
            );
        }
    }
}

/// Sizes, alpha, A and its strides, B and its strides, beta, C and its strides.
type UncheckedGemm<T> =
    unsafe fn(usize, usize, usize, T, *const T, isize, isize, *const T, isize, isize, T, *mut T, isize, isize);

/// The distances between rows and between columns, in elements.
#[derive(Debug, Clone, Copy)]
struct Strides {
    row: usize,
    column: usize,
}

impl Accumulator for f32 {
    const GEMM: UncheckedGemm<Self> = matrixmultiply::sgemm;

    fn from_f64(value: f64) -> Self {
        value as Self
    }

    fn to_f64(self) -> f64 {
        self.into()
    }

    fn round_to_tf32(self) -> Self {
        const DROPPED: u32 = f32::MANTISSA_DIGITS - 1 - 10;
        if !self.is_finite() {
            return self;
        }
        // Half a step less one, and one more if the remaining bit is odd: ties go to even. A carry runs into the
        // exponent, as it should, up to infinity.
        let bits = self.to_bits();
        let half = (1 << (DROPPED - 1)) - 1 + (bits >> DROPPED & 1);
        Self::from_bits((bits + half) & !((1 << DROPPED) - 1))
    }
}

impl Accumulator for f64 {
    const GEMM: UncheckedGemm<Self> = matrixmultiply::dgemm;

    fn from_f64(value: f64) -> Self {
        value
    }

    fn to_f64(self) -> f64 {
        self
    }
}

/// An element type of matrices.
trait Element: Pod + Into<Self::Wide> {
    type Wide: Accumulator;

    fn widen(self) -> Self::Wide {
        self.into()
    }

    /// Returns the nearest value.
    fn narrow(wide: Self::Wide) -> Self;
}

impl Element for f32 {
    type Wide = Self;

    fn narrow(wide: Self) -> Self {
        wide
    }
}

impl Element for f64 {
    type Wide = Self;

    fn narrow(wide: Self) -> Self {
        wide
    }
}

impl Element for half::f16 {
    type Wide = f32;

    fn narrow(wide: f32) -> Self {
        Self::from_f32(wide)
    }
}

impl Element for half::bf16 {
    type Wide = f32;

    fn narrow(wide: f32) -> Self {
        Self::from_f32(wide)
    }
}

/// Returns the bytes of an intermediate result of elements of this type.
pub(crate) fn intermediate_bytes(data_type: DataType) -> usize {
    match data_type {
        DataType::F64 => size_of::<f64>(),
        _ => size_of::<f32>(),
    }
}

/// Calls a method with an element type.
macro_rules! with_element {
    ($data_type:expr, $product:ident.$method:ident($($argument:expr),*)) => {
        match $data_type {
            DataType::F64 => $product.$method::<f64>($($argument),*),
            DataType::F16 => $product.$method::<half::f16>($($argument),*),
            DataType::Bf16 => $product.$method::<half::bf16>($($argument),*),
            _ => $product.$method::<f32>($($argument),*),
        }
    };
}

impl Product {
    /// Executes the first half.
    pub(crate) fn multiply(&self, memory: &DeviceMemory, panel: Panel) {
        with_element!(self.shape.data_type, self.multiply_as(memory, panel));
    }

    /// Executes the second half.
    pub(crate) fn finish(&self, memory: &DeviceMemory, panel: Panel) {
        with_element!(self.shape.output, self.finish_as(memory, panel));
    }

    /// Executes both halves, without a workspace.
    pub(crate) fn multiply_and_finish(&self, memory: &DeviceMemory) {
        match (self.shape.data_type, self.shape.output) {
            (DataType::F64, _) => self.multiply_and_finish_as::<f64, f64>(memory),
            (DataType::F16, DataType::F32) => self.multiply_and_finish_as::<half::f16, f32>(memory),
            (DataType::F16, _) => self.multiply_and_finish_as::<half::f16, half::f16>(memory),
            (DataType::Bf16, DataType::F32) => self.multiply_and_finish_as::<half::bf16, f32>(memory),
            (DataType::Bf16, _) => self.multiply_and_finish_as::<half::bf16, half::bf16>(memory),
            _ => self.multiply_and_finish_as::<f32, f32>(memory),
        }
    }

    fn multiply_as<T: Element>(&self, memory: &DeviceMemory, panel: Panel) {
        let bytes = panel.rows * panel.columns * size_of::<T::Wide>();
        for index in 0..panel.batches {
            let product = self.product::<T>(memory, panel, panel.batch + index);
            memory.write_slice(self.workspace + index * bytes, &product);
        }
    }

    fn finish_as<T: Element>(&self, memory: &DeviceMemory, panel: Panel) {
        let mut product = vec![T::Wide::zeroed(); panel.rows * panel.columns];
        for index in 0..panel.batches {
            memory.read_slice(self.workspace + index * size_of_val(&product[..]), &mut product);
            self.store::<T>(memory, panel, panel.batch + index, &product);
        }
    }

    fn multiply_and_finish_as<T: Element, U: Element<Wide = T::Wide>>(&self, memory: &DeviceMemory) {
        for panel in panels(&self.shape, self.shape.m * self.shape.n) {
            let product = self.product::<T>(memory, panel, panel.batch);
            self.store::<U>(memory, panel, panel.batch, &product);
        }
    }

    /// Returns whether A and B have no part in the result.
    pub(crate) fn ignores_factors(&self) -> bool {
        self.alpha.is_zero() || self.shape.k == 0
    }

    /// Returns how many elements of D the product spans.
    pub(crate) fn extent_d(&self) -> usize {
        let (batches, columns) = (self.shape.batch_count().saturating_sub(1), self.shape.n.saturating_sub(1));
        batches * self.stride_d + columns * self.ldd + self.shape.m
    }

    pub(crate) fn strides(&self) -> StridedBatch {
        self.shape.batch.unwrap_or(StridedBatch { count: 1, stride_a: 0, stride_b: 0, stride_c: 0 })
    }

    /// Returns `op(A) * op(B)` of one product of the batch, column-major and packed.
    fn product<T: Element>(&self, memory: &DeviceMemory, panel: Panel, batch: usize) -> Vec<T::Wide> {
        let Panel { row, rows, column, columns, .. } = panel;
        let mut product = vec![T::Wide::zeroed(); rows * columns];
        if self.ignores_factors() {
            return product;
        }
        let (shape, strides, k) = (&self.shape, self.strides(), self.shape.k);
        let a = self.a + batch * strides.stride_a * size_of::<T>();
        let b = self.b + batch * strides.stride_b * size_of::<T>();
        let factor = |base, ld, rows, columns| {
            let elements = load::<T>(memory, base, ld, rows, columns).into_iter().map(T::widen);
            if self.tf32 { elements.map(T::Wide::round_to_tf32).collect() } else { elements.collect() }
        };
        let (a, a_strides): (Vec<_>, _) = match shape.transpose_a {
            Transpose::No => (factor(a, shape.lda, (row, rows), (0, k)), Strides { row: 1, column: rows }),
            Transpose::Yes => (factor(a, shape.lda, (0, k), (row, rows)), Strides { row: k, column: 1 }),
        };
        let (b, b_strides): (Vec<_>, _) = match shape.transpose_b {
            Transpose::No => (factor(b, shape.ldb, (0, k), (column, columns)), Strides { row: 1, column: k }),
            Transpose::Yes => (factor(b, shape.ldb, (column, columns), (0, k)), Strides { row: columns, column: 1 }),
        };
        if !self.atomics || k < MIN_SPLIT_K {
            T::Wide::multiply(rows, k, columns, &a, a_strides, &b, b_strides, &mut product);
            return product;
        }
        let mut partial = product.clone();
        for part in any_order() {
            let (from, to) = (part * k / PARTS, (part + 1) * k / PARTS);
            let (a, b) = (&a[from * a_strides.column..], &b[from * b_strides.row..]);
            T::Wide::multiply(rows, to - from, columns, a, a_strides, b, b_strides, &mut partial);
            for (sum, &part) in product.iter_mut().zip(&partial) {
                *sum += part;
            }
        }
        product
    }

    /// Writes `D = epilogue(alpha * product + beta * C)` for one product of the batch.
    fn store<T: Element>(&self, memory: &DeviceMemory, panel: Panel, batch: usize, product: &[T::Wide]) {
        let Panel { row, rows, column, columns, .. } = panel;
        let (alpha, beta) = (self.alpha.read(memory), self.beta.read(memory));
        let (ignores_factors, adds_c) = (alpha == 0.0 || self.shape.k == 0, beta != 0.0);
        let (alpha, beta) = (T::Wide::from_f64(alpha), T::Wide::from_f64(beta));
        let place = |base: usize, stride: usize, ld: usize, column: usize| {
            base + (batch * stride + column * ld + row) * size_of::<T>()
        };
        let place_c = |column| place(self.c, self.strides().stride_c, self.shape.ldc, column);
        let place_d = |column| place(self.d, self.stride_d, self.ldd, column);
        let bias = self.bias.filter(|_| self.epilogue.has_bias()).map(|(bias, data_type)| match data_type {
            DataType::F16 => widened::<half::f16, T::Wide>(memory, bias, row, rows),
            DataType::Bf16 => widened::<half::bf16, T::Wide>(memory, bias, row, rows),
            DataType::F64 => widened::<f64, T::Wide>(memory, bias, row, rows),
            _ => widened::<f32, T::Wide>(memory, bias, row, rows),
        });
        let mut old = vec![T::zeroed(); rows];
        let mut result = vec![T::zeroed(); rows];
        for index in 0..columns {
            if adds_c {
                memory.read_slice(place_c(column + index), &mut old);
            }
            for (i, value) in result.iter_mut().enumerate() {
                let mut sum = T::Wide::zeroed();
                if !ignores_factors {
                    sum = alpha * product[index * rows + i];
                }
                if adds_c {
                    sum += beta * old[i].widen();
                }
                if let Some(bias) = &bias {
                    sum += bias[i];
                }
                *value = T::narrow(match self.epilogue {
                    Epilogue::Relu | Epilogue::BiasRelu => relu(sum),
                    Epilogue::Gelu | Epilogue::BiasGelu => gelu(sum),
                    _ => sum,
                });
            }
            memory.write_slice(place_d(column + index), &result);
        }
    }
}

/// Reads part of a vector, as wide as the sums that it is added to.
fn widened<T: Element, W: Accumulator>(memory: &DeviceMemory, base: usize, row: usize, rows: usize) -> Vec<W> {
    let values = load::<T>(memory, base, rows, (row, rows), (0, 1));
    values.into_iter().map(|value| W::from_f64(value.widen().to_f64())).collect()
}

/// Returns the positive part. A NaN stays a NaN.
fn relu<W: Accumulator>(x: W) -> W {
    if x < W::zeroed() { W::zeroed() } else { x }
}

/// Returns GELU in its tanh form. If x is negative the terms cancel, so 32 bits would leave few correct digits.
fn gelu<W: Accumulator>(x: W) -> W {
    let x = x.to_f64();
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    W::from_f64(0.5 * x * (1.0 + inner.tanh()))
}

/// The number of parts of k if atomics are allowed. With two parts, no order would show.
const PARTS: usize = 8;
/// The smallest k that is cut.
const MIN_SPLIT_K: usize = 64;

/// Returns the parts in another order each time, like blocks that add with atomics.
fn any_order() -> [usize; PARTS] {
    // Keys are random in each process and differ from call to call.
    let mut random = RandomState::new().hash_one(());
    let mut parts = std::array::from_fn(|part| part);
    for last in (1..PARTS).rev() {
        let choices = last as u64 + 1;
        parts.swap(last, (random % choices) as usize);
        random /= choices;
    }
    parts
}

/// Reads part of a matrix, packed. Rows and columns are (first, number).
fn load<T: Element>(
    memory: &DeviceMemory,
    base: usize,
    ld: usize,
    (row, rows): (usize, usize),
    (column, columns): (usize, usize),
) -> Vec<T> {
    let mut part = vec![T::zeroed(); rows * columns];
    let place = |column: usize| base + (column * ld + row) * size_of::<T>();
    if rows == ld {
        memory.read_slice(place(column), &mut part);
    } else {
        for (index, values) in part.chunks_exact_mut(rows).enumerate() {
            memory.read_slice(place(column + index), values);
        }
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_keeps_ten_bits_and_rounds_ties_to_even() {
        let step = 2f32.powi(-10);
        for (value, expected) in [
            (1.0, 1.0),
            (1.0 + step, 1.0 + step),
            (1.0 + 0.49 * step, 1.0),
            (1.0 + 0.5 * step, 1.0),
            (1.0 + 0.51 * step, 1.0 + step),
            (1.0 + 1.5 * step, 1.0 + 2.0 * step),
            (-1.0 - 2.5 * step, -1.0 - 2.0 * step),
            (2.0 - 0.25 * step, 2.0),
            (0.0, 0.0),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
        ] {
            assert_eq!(value.round_to_tf32(), expected, "{value:e}");
        }
        assert!(f32::from_bits(0x7f80_0001).round_to_tf32().is_nan());
    }

    #[test]
    fn gelu_is_itself_far_up_nothing_far_down_and_exact_between() {
        assert_eq!((gelu(1e30f32), gelu(-1e30f32), gelu(0f64)), (1e30, 0.0, 0.0));
        // The formula, computed elsewhere.
        for (x, expected) in [(1.0, 0.841_191_990_608_276_1), (-2.0, -0.045_402_305_912_224_94)] {
            assert!((gelu::<f64>(x) - expected).abs() < 1e-15, "{x}: {}", gelu::<f64>(x));
        }
        assert!(relu(f32::NAN).is_nan() && gelu(f32::NAN).is_nan());
    }

    #[test]
    fn parts_come_once_each_and_in_many_orders() {
        let orders: std::collections::HashSet<_> = (0..50)
            .map(|_| {
                let order = any_order();
                let mut sorted = order;
                sorted.sort_unstable();
                assert_eq!(sorted, std::array::from_fn(|part| part));
                order
            })
            .collect();
        assert!(orders.len() > 10, "{orders:?}");
    }

    /// Every element of every product belongs to exactly one panel, and no panel is larger than the workspace.
    #[test]
    fn panels_cover_a_product_once_for_every_capacity() {
        for (m, n, count) in [(1, 1, 1), (5, 3, 1), (3, 7, 4), (8, 8, 2)] {
            let shape = GemmShape::new(DataType::F32, m, n, 2).with_batch(StridedBatch {
                count,
                stride_a: 0,
                stride_b: 0,
                stride_c: m * n,
            });
            for capacity in 1..=m * n * count + 3 {
                let mut covered = vec![0; m * n * count];
                for panel in panels(&shape, capacity) {
                    assert!(panel.rows * panel.columns * panel.batches <= capacity);
                    for batch in panel.batch..panel.batch + panel.batches {
                        for column in panel.column..panel.column + panel.columns {
                            for row in panel.row..panel.row + panel.rows {
                                covered[batch * m * n + column * m + row] += 1;
                            }
                        }
                    }
                }
                assert!(covered.iter().all(|&times| times == 1), "{m}x{n}x{count} by {capacity}: {covered:?}");
            }
        }
    }
}
