//! Reference products on the CPU in `f64`, with a bound on the rounding error of a device.
//!
//! The reference adds `k` terms in `f64`. A device adds them in another order and with its own precision `eps`. Each of the `k`
//! multiplications and additions, the conversions of alpha and beta, and the last rounding have an error of at most `eps` of the
//! magnitudes involved. With `s = |alpha| * sum(|a| * |b|) + |beta * c|`, the results may differ by at most
//! `2 * (k + 4) * eps * s`. The factor 2 covers the rounding of the reference itself and fused operations. A result in a half
//! type has one more rounding. This is the usual a-priori bound of an inner product. It holds for any order of the additions.

use highwater_hal::{Backend, DataType, Epilogue, Gemm, GemmShape, Transpose};

use crate::case::{CaseResult, Failure, check};
use crate::device::{Block, DEVICE, Handle, Stream, holding_all, read_all};
use crate::random::Random;

/// The byte around the matrices of a [`Product`].
const GUARD: u8 = 0xc5;
/// The number of guard bytes before and after each matrix. It keeps the alignment of the first element.
pub(crate) const GUARD_BYTES: usize = 256;

/// The element types of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Types {
    factors: DataType,
    result: DataType,
}

impl Types {
    pub(crate) const F16: Self = Self::of(DataType::F16, DataType::F16);
    pub(crate) const BF16: Self = Self::of(DataType::Bf16, DataType::Bf16);
    pub(crate) const F32: Self = Self::of(DataType::F32, DataType::F32);
    pub(crate) const F64: Self = Self::of(DataType::F64, DataType::F64);
    pub(crate) const F16_TO_F32: Self = Self::of(DataType::F16, DataType::F32);
    pub(crate) const BF16_TO_F32: Self = Self::of(DataType::Bf16, DataType::F32);

    /// Returns the types of factors of one type and a result of another one.
    pub(crate) const fn of(factors: DataType, result: DataType) -> Self {
        Self { factors, result }
    }

    /// Returns the shape of packed matrices without transposes.
    pub(crate) fn shape(self, m: usize, n: usize, k: usize) -> GemmShape {
        GemmShape::new(self.factors, m, n, k).with_output(self.result)
    }
}

/// A matrix that a product reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operand {
    A,
    B,
    C,
}

/// One product: shape, factors, and the elements of A, B and C, gaps of leading dimensions and strides included.
#[derive(Debug, Clone)]
pub(crate) struct Product {
    pub(crate) shape: GemmShape,
    pub(crate) alpha: f64,
    pub(crate) beta: f64,
    seed: u64,
    /// Elements that do not follow from the seed, for messages.
    special: Vec<(Operand, usize, usize, f64)>,
    a: Vec<f64>,
    b: Vec<f64>,
    c: Vec<f64>,
    epilogue: Epilogue,
    pub(crate) bias: Option<Vec<f64>>,
    tf32: bool,
}

impl Product {
    /// Creates a product of `shape` with pseudo-random elements, alpha 1 and beta 0.
    pub(crate) fn new(shape: GemmShape, seed: u64) -> Self {
        let extents = shape.extents("conformance").expect("a case has a valid shape");
        let mut random = Random::new(seed);
        let mut elements = |data_type: DataType, count: usize| -> Vec<f64> {
            let mut element = || match data_type {
                DataType::F64 => random.fine(),
                DataType::F32 => f64::from(random.fine() as f32),
                _ => random.coarse(),
            };
            (0..count).map(|_| element()).collect()
        };
        let factor = shape.data_type;
        let (a, b) = (elements(factor, extents.a), elements(factor, extents.b));
        let c = elements(shape.output, extents.c);
        let special = Vec::new();
        Self { shape, alpha: 1.0, beta: 0.0, seed, special, a, b, c, epilogue: Epilogue::None, bias: None, tf32: false }
    }

    pub(crate) fn with_scale(mut self, alpha: f64, beta: f64) -> Self {
        (self.alpha, self.beta) = (alpha, beta);
        self
    }

    pub(crate) fn with_nan_in_c(mut self) -> Self {
        self.c.fill(f64::NAN);
        self
    }

    /// Sets every element of the old C to this value.
    pub(crate) fn with_old_c(mut self, value: f64) -> Self {
        self.c.fill(value);
        self
    }

    pub(crate) fn with_nan_in_factors(self) -> Self {
        self.with_factors(f64::NAN)
    }

    pub(crate) fn with_ones_in_factors(self) -> Self {
        self.with_factors(1.0)
    }

    /// Sets every element of A and B to this value.
    pub(crate) fn with_factors(mut self, value: f64) -> Self {
        self.a.fill(value);
        self.b.fill(value);
        self
    }

    /// Sets every element of the bias, if any, to this value.
    pub(crate) fn with_bias(mut self, value: f64) -> Self {
        if let Some(bias) = &mut self.bias {
            bias.fill(value);
        }
        self
    }

    /// Sets single elements of A and B, at the row and column at which they are stored.
    pub(crate) fn with_elements(mut self, elements: &[(Operand, usize, usize, f64)]) -> Self {
        for &(operand, row, column, value) in elements {
            let (matrix, ld) = match operand {
                Operand::A => (&mut self.a, self.shape.lda),
                Operand::B => (&mut self.b, self.shape.ldb),
                Operand::C => (&mut self.c, self.shape.ldc),
            };
            matrix[row + column * ld] = value;
        }
        self.special.extend(elements);
        self
    }

    /// Takes the bound of products whose factors are first rounded to TF32.
    pub(crate) fn with_tf32(mut self) -> Self {
        self.tf32 = true;
        self
    }

    /// Sets the epilogue, and a bias if the epilogue has one.
    pub(crate) fn with_epilogue(mut self, epilogue: Epilogue) -> Self {
        let mut random = Random::new(self.seed ^ 0xb1a5);
        self.epilogue = epilogue;
        // A 32-bit bias has more digits than the factors can have. A bias that is read or added in their type is therefore
        // noticed.
        let wide = self.shape.is_mixed();
        let mut element = || if wide { f64::from(random.fine() as f32) } else { random.coarse() };
        self.bias = epilogue.has_bias().then(|| (0..self.shape.m).map(|_| element()).collect());
        self
    }

    pub(crate) fn epilogue(&self) -> Epilogue {
        self.epilogue
    }

    /// Sets the factors of a GEMM to those of the product.
    pub(crate) fn scaled(&self, gemm: Gemm) -> Gemm {
        gemm.with_scale(self.alpha, self.beta)
    }

    /// Puts the matrices on the first device.
    pub(crate) fn place<'b>(&self, backend: &'b dyn Backend) -> Result<Placed<'b>, Failure> {
        self.place_on(backend, DEVICE)
    }

    /// Puts the matrices on a device.
    pub(crate) fn place_on<'b>(&self, backend: &'b dyn Backend, device: u32) -> Result<Placed<'b>, Failure> {
        let (factor, result) = (self.shape.data_type, self.shape.output);
        let encoded = |of: DataType, elements: &[f64]| guarded(&encode(of, elements));
        let (a, b, c) = (encoded(factor, &self.a), encoded(factor, &self.b), encoded(result, &self.c));
        let [a, b, c] = holding_all(backend, device, [a.as_slice(), b.as_slice(), c.as_slice()])?;
        let bias = match &self.bias {
            Some(bias) => {
                let [bias] = holding_all(backend, device, [encoded(result, bias).as_slice()])?;
                Some(bias)
            }
            None => None,
        };
        Ok(Placed { backend, a, b, c, bias })
    }

    /// Places the matrices on the device of the stream, runs the product as a GEMM, waits, and checks every byte.
    pub(crate) fn prove(&self, backend: &dyn Backend, handle: &mut Handle<'_>, stream: &Stream<'_>) -> CaseResult {
        let placed = self.place_on(backend, stream.id().device())?;
        placed.gemm(self, handle)?;
        stream.synchronize()?;
        placed.check(self)
    }

    /// Returns the expected value of element (row, column) of C of one product of the batch, and the bound on its error.
    fn reference(&self, product: usize, row: usize, column: usize) -> (f64, f64) {
        let GemmShape { output, transpose_a, transpose_b, k, lda, ldb, .. } = self.shape;
        let (stride_a, stride_b) = self.shape.batch.map_or((0, 0), |batch| (batch.stride_a, batch.stride_b));
        let (mut sum, mut magnitude) = (0.0, 0.0);
        // Without terms, alpha has no effect, whatever it is.
        let alpha = if k == 0 { 0.0 } else { self.alpha };
        if alpha != 0.0 {
            for inner in 0..k {
                let a = match transpose_a {
                    Transpose::No => row + inner * lda,
                    Transpose::Yes => inner + row * lda,
                };
                let b = match transpose_b {
                    Transpose::No => inner + column * ldb,
                    Transpose::Yes => column + inner * ldb,
                };
                let term = self.a[product * stride_a + a] * self.b[product * stride_b + b];
                sum += term;
                magnitude += term.abs();
            }
        }
        let (mut value, mut scale) = (alpha * sum, alpha.abs() * magnitude);
        // The magnitude of the sum before the epilogue.
        let mut parts = value.abs();
        if self.beta != 0.0 {
            let old = self.beta * self.c[self.index_c(product, row, column)];
            value += old;
            scale += old.abs();
            parts += old.abs();
        }
        // Sums are as wide as the result, whatever the type of the factors.
        let Precision { computed, stored, smallest, largest } = Precision::of(output);
        // A vendor may continue with the rounded sums.
        let goes_on = self.epilogue != Epilogue::None || self.beta != 0.0;
        let between = if goes_on { stored * parts } else { 0.0 };
        if let Some(bias) = &self.bias {
            value += bias[row];
            scale += bias[row].abs();
        }
        // Each factor has an error of up to half a unit of a 10-bit mantissa.
        let factors = if self.tf32 { 2.0_f64.powi(-10) * 1.01 * scale } else { 0.0 };
        let off = 2.0 * (k + 4) as f64 * computed * scale + factors + between;
        let (value, off) = match self.epilogue {
            Epilogue::None | Epilogue::Bias => (value, off),
            Epilogue::Relu | Epilogue::BiasRelu => (value.max(0.0), off),
            // The slope of GELU is at most 1.13. Its terms are no larger than its argument, and the device may have its own
            // tanh.
            _ => (gelu(value), 1.13 * off + (16.0 * computed + 2.0_f64.powi(-14)) * value.abs()),
        };
        let value = if value.abs() > largest { value.signum() * f64::INFINITY } else { value };
        (value, off + stored * value.abs() + smallest)
    }

    fn index_c(&self, product: usize, row: usize, column: usize) -> usize {
        let stride = self.shape.batch.map_or(0, |batch| batch.stride_c);
        product * stride + row + column * self.shape.ldc
    }

    fn describe(&self) -> String {
        let GemmShape { data_type, output, transpose_a, transpose_b, m, n, k, lda, ldb, ldc, batch, .. } = self.shape;
        let Self { alpha, beta, seed, epilogue, special, .. } = self;
        let special = if special.is_empty() { String::new() } else { format!(", but for {special:?}") };
        let batch = batch.map_or(String::new(), |batch| format!(", {batch:?}"));
        let to = if self.shape.is_mixed() { format!(" to {output:?}") } else { String::new() };
        let epilogue = if *epilogue == Epilogue::None { String::new() } else { format!(", then {epilogue:?}") };
        format!(
            "{data_type:?} product{to} {m}x{n}x{k}, transposed A {transpose_a:?} B {transpose_b:?}, leading dimensions \
             {lda} {ldb} {ldc}, alpha {alpha}, beta {beta}{batch}{epilogue}, seed {seed}{special}"
        )
    }
}

/// The matrices of a [`Product`] on a device, between guards.
#[derive(Debug)]
pub(crate) struct Placed<'b> {
    backend: &'b dyn Backend,
    pub(crate) a: Block<'b>,
    pub(crate) b: Block<'b>,
    pub(crate) c: Block<'b>,
    /// Also between guards.
    pub(crate) bias: Option<Block<'b>>,
}

impl Placed<'_> {
    /// Enqueues the product as a GEMM.
    pub(crate) fn gemm(&self, product: &Product, handle: &mut Handle<'_>) -> highwater_hal::Result<()> {
        let zero = highwater_hal::DevicePtr::new(0);
        let gemm = Gemm::new(product.shape, zero, zero, zero).with_scale(product.alpha, product.beta);
        handle.gemm(&gemm, self.operands())
    }

    /// Returns the addresses of the matrices.
    pub(crate) fn operands(&self) -> [(&Block<'_>, usize); 3] {
        [(&self.a, GUARD_BYTES), (&self.b, GUARD_BYTES), (&self.c, GUARD_BYTES)]
    }

    /// Returns the bytes of C, without guards.
    pub(crate) fn bytes_of_c(&self) -> Result<Vec<u8>, Failure> {
        let bytes = self.c.read()?;
        Ok(bytes[GUARD_BYTES..bytes.len() - GUARD_BYTES].to_vec())
    }

    /// Returns the elements of C, gaps included.
    pub(crate) fn elements_of_c(&self, product: &Product) -> Result<Vec<f64>, Failure> {
        Ok(decode(product.shape.output, &self.bytes_of_c()?))
    }

    /// Checks every element of C, the gaps and guards around them, and that A and B are unchanged.
    pub(crate) fn check(&self, product: &Product) -> CaseResult {
        let shape = &product.shape;
        let element_bytes = shape.output.bytes();
        let blocks = read_all(self.backend, &[&self.a, &self.b, &self.c])?;
        for (name, bytes, elements) in [("A", &blocks[0], &product.a), ("B", &blocks[1], &product.b)] {
            check!(
                *bytes == guarded(&encode(shape.data_type, elements)),
                "{}: {name} or the memory around it was changed",
                product.describe()
            );
        }
        if let (Some(bias), Some(elements)) = (&self.bias, &product.bias) {
            let same = bias.read()? == guarded(&encode(shape.output, elements));
            check!(same, "{}: the bias or the memory around it was changed", product.describe());
        }
        let bytes = &blocks[2];
        let before = guarded(&encode(shape.output, &product.c));
        let got = decode(shape.output, &bytes[GUARD_BYTES..bytes.len() - GUARD_BYTES]);
        let mut written = vec![false; bytes.len()];
        if !shape.is_empty() {
            for batch in 0..shape.batch_count() {
                for column in 0..shape.n {
                    for row in 0..shape.m {
                        let index = product.index_c(batch, row, column);
                        let (expected, bound) = product.reference(batch, row, column);
                        check!(
                            agrees(got[index], expected, bound),
                            "{}: element ({row}, {column}) of product {batch} is {:e}, expected {expected:e} within \
                             {bound:e}",
                            product.describe(),
                            got[index]
                        );
                        let start = GUARD_BYTES + index * element_bytes;
                        written[start..start + element_bytes].fill(true);
                    }
                }
            }
        }
        let changed = (0..bytes.len()).find(|&at| !written[at] && bytes[at] != before[at]);
        check!(
            changed.is_none(),
            "{}: memory outside the elements of C was changed, first at byte {} from the first element",
            product.describe(),
            changed.unwrap_or_default() as i64 - GUARD_BYTES as i64
        );
        Ok(())
    }
}

/// Returns whether an element has its expected value. NaN must be NaN, and infinity must be exact.
fn agrees(got: f64, expected: f64, bound: f64) -> bool {
    match (expected.is_nan(), expected.is_infinite()) {
        (true, _) => got.is_nan(),
        (_, true) => got == expected,
        _ => (got - expected).abs() <= bound,
    }
}

/// The precision of a type.
struct Precision {
    /// The relative error of one operation.
    computed: f64,
    /// The relative error of storing a result.
    stored: f64,
    /// The absolute error of storing a result. It covers a device that flushes subnormal numbers to zero.
    smallest: f64,
    /// The largest finite number. A result beyond it is infinite.
    largest: f64,
}

impl Precision {
    fn of(data_type: DataType) -> Self {
        let (single, smallest) = (f64::from(f32::EPSILON), f64::from(f32::MIN_POSITIVE));
        let largest = f64::from(f32::MAX);
        match data_type {
            DataType::F64 => {
                Self { computed: f64::EPSILON, stored: 0.0, smallest: f64::MIN_POSITIVE, largest: f64::MAX }
            }
            DataType::F16 => {
                Self { computed: single, stored: 2.0_f64.powi(-10), smallest: 2.0_f64.powi(-14), largest: 65_504.0 }
            }
            DataType::Bf16 => Self { computed: single, stored: 2.0_f64.powi(-7), smallest, largest },
            _ => Self { computed: single, stored: 0.0, smallest, largest },
        }
    }
}

/// Computes GELU in its tanh form.
fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    x / 2.0 * (1.0 + inner.tanh())
}

fn guarded(bytes: &[u8]) -> Vec<u8> {
    let guard = [GUARD; GUARD_BYTES];
    [&guard[..], bytes, &guard[..]].concat()
}

/// Returns the bytes of numbers that the element type represents exactly.
fn encode(data_type: DataType, elements: &[f64]) -> Vec<u8> {
    match data_type {
        DataType::F64 => bytes_of_each(elements, f64::to_le_bytes),
        DataType::F16 => bytes_of_each(elements, |x| f16_bits(x).to_le_bytes()),
        DataType::Bf16 => bytes_of_each(elements, |x| (((x as f32).to_bits() >> 16) as u16).to_le_bytes()),
        _ => bytes_of_each(elements, |x| (x as f32).to_le_bytes()),
    }
}

/// Returns the bytes of the elements, one after the other.
pub(crate) fn bytes_of_each<T: Copy, const N: usize>(elements: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    elements.iter().map(|&element| bytes(element)).collect::<Vec<[u8; N]>>().into_flattened()
}

fn decode(data_type: DataType, bytes: &[u8]) -> Vec<f64> {
    let halves = || bytes.as_chunks::<2>().0.iter().map(|&pair| u16::from_le_bytes(pair));
    match data_type {
        DataType::F64 => bytes.as_chunks::<8>().0.iter().map(|&eight| f64::from_le_bytes(eight)).collect(),
        DataType::F16 => halves().map(f16_value).collect(),
        DataType::Bf16 => halves().map(|bits| f64::from(f32::from_bits(u32::from(bits) << 16))).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|&four| f64::from(f32::from_le_bytes(four))).collect(),
    }
}

/// Returns the bits of a normal number, zero, infinity or NaN that half precision represents exactly.
fn f16_bits(value: f64) -> u16 {
    let bits = (value as f32).to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    if value.is_nan() {
        return sign | 0x7e00;
    }
    if value == 0.0 {
        return sign;
    }
    if value.is_infinite() {
        return sign | 0x7c00;
    }
    let exponent = (bits >> 23 & 0xff) as i32 - 127;
    assert!((-14..=15).contains(&exponent) && bits & 0x1fff == 0, "{value} is not exact in half precision");
    sign | ((exponent + 15) as u16) << 10 | (bits >> 13 & 0x3ff) as u16
}

fn f16_value(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let mantissa = f64::from(bits & 0x3ff);
    match bits >> 10 & 0x1f {
        0 => sign * mantissa * 2.0_f64.powi(-24),
        0x1f if mantissa == 0.0 => sign * f64::INFINITY,
        0x1f => f64::NAN,
        exponent => sign * (1.0 + mantissa / 1024.0) * 2.0_f64.powi(i32::from(exponent) - 15),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coarse_numbers_pass_through_every_type_unchanged() {
        let mut random = Random::new(7);
        let numbers: Vec<f64> = (0..200).map(|_| random.coarse()).collect();
        for data_type in [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64] {
            assert_eq!(decode(data_type, &encode(data_type, &numbers)), numbers, "{data_type:?}");
            assert!(decode(data_type, &encode(data_type, &[f64::NAN]))[0].is_nan(), "{data_type:?}");
            let infinite = [f64::INFINITY, f64::NEG_INFINITY];
            assert_eq!(decode(data_type, &encode(data_type, &infinite)), infinite, "{data_type:?}");
        }
    }

    #[test]
    fn half_precision_numbers_are_read_right() {
        for (bits, value) in [(0x3c00, 1.0), (0xc000, -2.0), (0x7bff, 65504.0), (0x0001, 2.0_f64.powi(-24))] {
            assert_eq!(f16_value(bits), value);
        }
        assert_eq!(f16_value(0x7c00), f64::INFINITY);
    }

    #[test]
    fn the_reference_multiplies_column_major_matrices() {
        let mut product = Product::new(GemmShape::new(DataType::F64, 2, 1, 2), 1).with_scale(2.0, 3.0);
        // A = [1 2; 3 4] by columns, B = (5, 6), C = (7, 8).
        (product.a, product.b, product.c) = (vec![1.0, 3.0, 2.0, 4.0], vec![5.0, 6.0], vec![7.0, 8.0]);
        assert_eq!(product.reference(0, 0, 0).0, 2.0 * 17.0 + 21.0);
        assert_eq!(product.reference(0, 1, 0).0, 2.0 * 39.0 + 24.0);
        product.shape = product.shape.with_transposed_a();
        assert_eq!(product.reference(0, 0, 0).0, 2.0 * 23.0 + 21.0);
    }

    #[test]
    fn epilogues_change_the_reference_as_they_are_defined() {
        let mut product = Product::new(GemmShape::new(DataType::F64, 1, 1, 1), 1);
        (product.a, product.b) = (vec![-1.5], vec![1.0]);
        let value = |product: &Product, epilogue| product.clone().with_epilogue(epilogue).reference(0, 0, 0).0;
        assert_eq!(value(&product, Epilogue::Relu), 0.0);
        // From a table of the function.
        assert!((value(&product, Epilogue::Gelu) + 0.100_428_4).abs() < 1e-6, "{}", value(&product, Epilogue::Gelu));
        product.a = vec![2.0];
        assert!((value(&product, Epilogue::Gelu) - 1.954_597_7).abs() < 1e-6, "{}", value(&product, Epilogue::Gelu));
        let bias = product.clone().with_epilogue(Epilogue::Bias).bias.unwrap()[0];
        assert_eq!(value(&product, Epilogue::Bias), 2.0 + bias);
        assert_eq!(value(&product, Epilogue::BiasGelu), gelu(2.0 + bias));
    }

    #[test]
    fn the_bound_of_mixed_types_sees_a_rounding_to_the_factors_type() {
        for factor in [DataType::F16, DataType::Bf16] {
            let shape = GemmShape::new(factor, 1, 1, 3).with_output(DataType::F32);
            let mut product = Product::new(shape, 1).with_epilogue(Epilogue::Bias);
            (product.a, product.b) = (vec![33.0, 1.0, 1.0], vec![31.0, 0.125, 0.0625]);
            let (value, bound) = product.reference(0, 0, 0);
            let sum = 33.0 * 31.0 + 0.125 + 0.0625;
            assert_eq!(value, sum + product.bias.as_ref().unwrap()[0]);
            let rounded = match factor {
                DataType::F16 => f16_value(f16_bits(1023.0)),
                _ => 1024.0,
            };
            assert!((rounded - sum).abs() > 100.0 * bound, "{factor:?}: {bound}");
        }
    }

    #[test]
    fn what_is_no_number_reaches_its_row_and_agrees_with_nothing_else() {
        let product = Product::new(GemmShape::new(DataType::F32, 3, 2, 4), 1);
        let product = product.with_elements(&[(Operand::A, 1, 2, f64::NAN), (Operand::B, 0, 1, f64::INFINITY)]);
        let reference = |row, column| product.reference(0, row, column);
        assert!(reference(1, 0).0.is_nan() && reference(1, 1).0.is_nan());
        assert!(reference(0, 0).0.is_finite() && reference(2, 1).0.is_infinite());
        let (infinite, bound) = reference(2, 1);
        assert!(agrees(f64::NAN, f64::NAN, bound) && agrees(infinite, infinite, bound));
        assert!(!agrees(0.0, f64::NAN, bound) && !agrees(-infinite, infinite, bound) && !agrees(1e30, infinite, bound));
        assert!(!agrees(f64::NAN, 1.0, 0.1) && !agrees(f64::INFINITY, 1.0, 0.1) && agrees(1.05, 1.0, 0.1));
    }

    #[test]
    fn the_bound_is_tight_enough_to_see_a_lost_term() {
        let product = Product::new(GemmShape::new(DataType::F32, 1, 1, 1000), 1);
        let (_, bound) = product.reference(0, 0, 0);
        assert!(bound < 0.5, "{bound}");
        let double = Product::new(GemmShape::new(DataType::F64, 1, 1, 1000), 1);
        assert!(double.reference(0, 0, 0).1 < 1e-9);
    }
}
