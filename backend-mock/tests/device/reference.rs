//! Products computed in 64 bits, and how far a product of a device may be from them.

use bytemuck::Pod;
use half::{bf16, f16};
use highwater_hal::{DataType, DevicePtr, Epilogue, GemmShape, MathMode, StridedBatch, Transpose};

use crate::rig::Rig;

/// An element type of products.
pub(crate) trait Number: Pod + PartialEq + std::fmt::Debug {
    const TYPE: DataType;
    /// Greatest relative error of one operation of a sum.
    const ROUNDING: f64;
    /// Greatest relative error of rounding a sum to the type.
    const STORING: f64;
    fn new(value: f64) -> Self;
    fn value(self) -> f64;
}

macro_rules! number {
    ($type:ty, $variant:ident, $rounding:expr, $storing:expr, $new:expr, $value:expr) => {
        impl Number for $type {
            const TYPE: DataType = DataType::$variant;
            const ROUNDING: f64 = $rounding;
            const STORING: f64 = $storing;
            fn new(value: f64) -> Self {
                $new(value)
            }
            fn value(self) -> f64 {
                $value(self)
            }
        }
    };
}

const SINGLE: f64 = f32::EPSILON as f64 / 2.0;

number!(f16, F16, SINGLE, 1.0 / 2048.0, f16::from_f64, f16::to_f64);
number!(bf16, Bf16, SINGLE, 1.0 / 256.0, bf16::from_f64, bf16::to_f64);
number!(f32, F32, SINGLE, SINGLE, |value| value as f32, f64::from);
number!(f64, F64, f64::EPSILON / 2.0, f64::EPSILON / 2.0, |value| value, |value| value);

/// Values between -1 and 1 that look random.
pub(crate) fn values<T: Number>(count: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        T::new((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}

/// A product with its matrices.
pub(crate) struct Problem<T> {
    pub(crate) shape: GemmShape,
    pub(crate) alpha: f64,
    pub(crate) beta: f64,
    pub(crate) a: Vec<T>,
    pub(crate) b: Vec<T>,
    pub(crate) c: Vec<T>,
    pub(crate) bias: Vec<T>,
    pub(crate) epilogue: Epilogue,
    pub(crate) math_mode: MathMode,
}

/// The same matrices on the device.
#[derive(Clone, Copy)]
pub(crate) struct Placed {
    pub(crate) a: DevicePtr,
    pub(crate) b: DevicePtr,
    pub(crate) c: DevicePtr,
    pub(crate) bias: DevicePtr,
}

impl<T: Number> Problem<T> {
    pub(crate) fn new(shape: GemmShape, alpha: f64, beta: f64) -> Self {
        let extents = shape.extents("test").unwrap();
        Self {
            shape,
            alpha,
            beta,
            a: values(extents.a.max(1), 1),
            b: values(extents.b.max(1), 2),
            // Some elements behind the last one, which are to stay as they are.
            c: values(extents.c + 5, 3),
            bias: values(shape.m.max(1), 4),
            epilogue: Epilogue::None,
            math_mode: MathMode::Default,
        }
    }

    pub(crate) fn place(&self, rig: &Rig) -> Placed {
        let [a, b, c, bias] = [&self.a, &self.b, &self.c, &self.bias].map(|values| rig.upload(values));
        Placed { a, b, c, bias }
    }

    /// Checks every element of the result, computed in the place of C, and that those between the columns are what they were.
    pub(crate) fn check(&self, seen: &[T], what: &str) {
        if let Some(wrong) = self.wrong(seen) {
            panic!("{what}: {:?}: {wrong}", self.shape);
        }
    }

    /// The first element that is wrong.
    pub(crate) fn wrong(&self, seen: &[T]) -> Option<String> {
        assert_eq!(seen.len(), self.c.len());
        let mut expected: Vec<_> = self.c.iter().map(|old| (old.value(), 0.0)).collect();
        let batch = self.shape.batch.unwrap_or(StridedBatch { count: 1, stride_a: 0, stride_b: 0, stride_c: 0 });
        for index in 0..batch.count {
            for column in 0..self.shape.n {
                for row in 0..self.shape.m {
                    expected[index * batch.stride_c + column * self.shape.ldc + row] =
                        self.element(batch, index, row, column);
                }
            }
        }
        seen.iter().zip(expected).enumerate().find_map(|(index, (seen, (expected, bound)))| {
            let error = (seen.value() - expected).abs();
            // Not the other way round: an error may be no number.
            let is_right = error <= bound;
            let wrong =
                || format!("element {index} is {seen:?}, expected {expected} within {bound:e}, off by {error:e}");
            (!is_right).then(wrong)
        })
    }

    /// The value of one element, and how far a device may be from it.
    fn element(&self, batch: StridedBatch, index: usize, row: usize, column: usize) -> (f64, f64) {
        let shape = &self.shape;
        let (mut sum, mut magnitude) = (0.0, 0.0);
        if self.alpha != 0.0 {
            for inner in 0..shape.k {
                let a = match shape.transpose_a {
                    Transpose::No => row + inner * shape.lda,
                    Transpose::Yes => inner + row * shape.lda,
                };
                let b = match shape.transpose_b {
                    Transpose::No => inner + column * shape.ldb,
                    Transpose::Yes => column + inner * shape.ldb,
                };
                let term = self.a[index * batch.stride_a + a].value() * self.b[index * batch.stride_b + b].value();
                sum += self.alpha * term;
                magnitude += (self.alpha * term).abs();
            }
        }
        // Each factor is off by up to half a step of a mantissa of 10 bits, so a term by one step.
        let factors = if self.math_mode == MathMode::Tf32 { 2f64.powi(-10) * 1.01 * magnitude } else { 0.0 };
        let mut add = |term: f64| {
            sum += term;
            magnitude += term.abs();
        };
        if self.beta != 0.0 {
            add(self.beta * self.c[index * batch.stride_c + column * shape.ldc + row].value());
        }
        if self.epilogue.has_bias() {
            add(self.bias[row].value());
        }
        // A term is multiplied twice and added up to k times, then scaled; C and the bias are added.
        let error = (shape.k + 4) as f64 * T::ROUNDING * magnitude + factors;
        let (value, steepness) = match self.epilogue {
            Epilogue::Relu | Epilogue::BiasRelu => (sum.max(0.0), 1.0),
            Epilogue::Gelu | Epilogue::BiasGelu => (gelu(sum), 1.13),
            _ => (sum, 1.0),
        };
        // Half a step of the subnormal numbers, and more.
        let smallest = if T::TYPE == DataType::F16 { 2f64.powi(-24) } else { f64::MIN_POSITIVE };
        (value, steepness * error + T::STORING * (value.abs() + steepness * error) + smallest)
    }
}

fn gelu(x: f64) -> f64 {
    x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}
