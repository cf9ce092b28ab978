//! Matrices of every type, and products of them in 64 bits.

use half::{bf16, f16};

/// `CUDA_R_32F`.
pub const F32: u32 = 0;
/// `CUDA_R_64F`.
pub const F64: u32 = 1;
/// `CUDA_R_16F`.
pub const F16: u32 = 2;
/// `CUDA_R_16BF`.
pub const BF16: u32 = 14;

/// `CUBLAS_COMPUTE_32F`.
pub const IN_32F: u32 = 68;
/// `CUBLAS_COMPUTE_32F_FAST_TF32`.
pub const IN_TF32: u32 = 77;
/// `CUBLAS_COMPUTE_64F`.
pub const IN_64F: u32 = 70;

/// Returns the bytes of an element.
pub fn bytes(data_type: u32) -> usize {
    match data_type {
        F64 => 8,
        F32 => 4,
        _ => 2,
    }
}

/// Returns values as a type holds them.
pub fn encode(data_type: u32, values: &[f64]) -> Vec<u8> {
    let one = |&value: &f64| match data_type {
        F64 => value.to_le_bytes().to_vec(),
        F32 => (value as f32).to_le_bytes().to_vec(),
        F16 => f16::from_f64(value).to_le_bytes().to_vec(),
        _ => bf16::from_f64(value).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(one).collect()
}

/// Returns the values that a type holds.
pub fn decode(data_type: u32, encoded: &[u8]) -> Vec<f64> {
    fn part<const N: usize>(chunk: &[u8]) -> [u8; N] {
        std::array::from_fn(|index| chunk[index])
    }
    let one = |chunk: &[u8]| match data_type {
        F64 => f64::from_le_bytes(part(chunk)),
        F32 => f64::from(f32::from_le_bytes(part(chunk))),
        F16 => f16::from_le_bytes(part(chunk)).to_f64(),
        _ => bf16::from_le_bytes(part(chunk)).to_f64(),
    };
    encoded.chunks_exact(bytes(data_type)).map(one).collect()
}

/// Numbers between -1 and 1, as `data_type` holds them.
pub fn numbers(data_type: u32, count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    let exact: Vec<_> = (0..count).map(|_| next()).collect();
    decode(data_type, &encode(data_type, &exact))
}

/// Returns a square matrix that is `value` on its diagonal.
pub fn diagonal_of(edge: usize, value: f32) -> Vec<f32> {
    (0..edge * edge).map(|index| if index.is_multiple_of(edge + 1) { value } else { 0.0 }).collect()
}

/// Returns whether a square matrix is `value` on its diagonal and 0 elsewhere.
pub fn is_diagonal(seen: &[f32], edge: usize, value: f32) -> bool {
    seen == diagonal_of(edge, value)
}

/// A product of column-major matrices: transposed or not, sizes, leading dimensions.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Whether A and B are stored transposed.
    pub transposed: (bool, bool),
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Leading dimension of A.
    pub lda: usize,
    /// Leading dimension of B.
    pub ldb: usize,
    /// Leading dimension of C.
    pub ldc: usize,
}

impl Shape {
    /// Returns a product without transposes, whose matrices have no gaps.
    pub fn packed(m: usize, n: usize, k: usize) -> Self {
        Self { transposed: (false, false), m, n, k, lda: m, ldb: k, ldc: m }
    }

    /// Returns how many elements A, B and C span.
    pub fn elements(&self) -> [usize; 3] {
        [
            self.lda * if self.transposed.0 { self.m } else { self.k },
            self.ldb * if self.transposed.1 { self.k } else { self.n },
            self.ldc * self.n,
        ]
    }

    /// A result, and the sum of the sizes of what was added up for it.
    pub fn element(&self, a: &[f64], b: &[f64], row: usize, column: usize) -> (f64, f64) {
        let mut sums = (0.0, 0.0);
        for k in 0..self.k {
            let a = if self.transposed.0 { a[k + row * self.lda] } else { a[row + k * self.lda] };
            let b = if self.transposed.1 { b[column + k * self.ldb] } else { b[k + column * self.ldb] };
            sums = (sums.0 + a * b, sums.1 + (a * b).abs());
        }
        sums
    }

    /// Returns what C becomes with the product in it.
    pub fn reference(&self, scales: (f64, f64), matrices: [&[f64]; 3]) -> Vec<f64> {
        let exact = self.expected(Bound::of(F64, IN_64F), scales, matrices, |_, value| value);
        exact.into_iter().map(|(value, _)| value).collect()
    }

    /// What C becomes, each element with how far it may be off. Elements outside of the product stay as they are.
    pub fn expected(
        &self,
        bound: Bound,
        (alpha, beta): (f64, f64),
        [a, b, c]: [&[f64]; 3],
        finish: impl Fn(usize, f64) -> f64,
    ) -> Vec<(f64, f64)> {
        let mut expected: Vec<_> = c.iter().map(|&value| (value, 0.0)).collect();
        for column in 0..self.n {
            for row in 0..self.m {
                let place = row + column * self.ldc;
                let (sum, sizes) = self.element(a, b, row, column);
                let old = if beta == 0.0 { 0.0 } else { beta * c[place] };
                let value = finish(row, alpha * sum + old);
                let sizes = alpha.abs() * sizes + old.abs();
                let room = sizes * (bound.input + bound.sum * (self.k as f64 + 4.0)) + bound.output * value.abs();
                expected[place] = (value, room + bound.least);
            }
        }
        expected
    }
}

/// How far results of a type may be off: by the rounding of inputs, of each addition, and of the output.
#[derive(Debug, Clone, Copy)]
pub struct Bound {
    input: f64,
    sum: f64,
    output: f64,
    least: f64,
}

impl Bound {
    /// Returns the bound of a type in a computation.
    pub fn of(data_type: u32, compute: u32) -> Self {
        let unit = |bits: i32| 2f64.powi(-bits);
        let (sum, output) = match data_type {
            F64 => (unit(52), unit(52)),
            F32 => (unit(23), unit(23)),
            F16 => (unit(23), unit(10)),
            _ => (unit(23), unit(7)),
        };
        // TF32 keeps 10 bits of each of two inputs.
        let input = if compute == IN_TF32 { unit(9) } else { 0.0 };
        Self { input, sum, output, least: if data_type == F16 { unit(24) } else { 0.0 } }
    }

    /// With a function behind the product that approximations of other kinds are allowed for.
    pub fn loosened(mut self) -> Self {
        self.least += 4e-3;
        self
    }
}

/// The first element that is off by too much, or that none is.
pub fn compare(seen: &[f64], expected: &[(f64, f64)]) -> String {
    let off = |(_, (seen, (expected, room))): &(usize, (&f64, &(f64, f64)))| {
        // Written so that a NaN is off.
        let close = (**seen - expected).abs() <= *room;
        !close
    };
    match seen.iter().zip(expected).enumerate().find(off) {
        _ if seen.len() != expected.len() => "other sizes".to_owned(),
        Some((index, (seen, (expected, room)))) => {
            format!("element {index} is {seen}, not {expected} within {room:e}")
        }
        None => "right".to_owned(),
    }
}
