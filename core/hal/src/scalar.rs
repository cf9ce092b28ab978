//! What may lie in a buffer, and what may be multiplied.

use bytemuck::Pod;

use crate::blas::{DataType, GemmShape};

/// Values that devices may copy and overwrite bit by bit: any bit pattern is a value. Implemented for all such types.
pub trait Element: Pod + Send + Sync {}

impl<T: Pod + Send + Sync> Element for T {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Numbers that BLAS multiplies.
pub trait Scalar: Element + sealed::Sealed {
    /// The type as the traits name it.
    const DATA_TYPE: DataType;
    /// The value in the width of `alpha` and `beta`; exact.
    fn to_f64(self) -> f64;
}

impl Scalar for f32 {
    const DATA_TYPE: DataType = DataType::F32;
    #[inline]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Scalar for f64 {
    const DATA_TYPE: DataType = DataType::F64;
    #[inline]
    fn to_f64(self) -> f64 {
        self
    }
}

/// IEEE half precision, as the [`half`] crate has it; products are accumulated in 32 bits.
impl Scalar for half::f16 {
    const DATA_TYPE: DataType = DataType::F16;
    #[inline]
    fn to_f64(self) -> f64 {
        Self::to_f64(self)
    }
}

/// bfloat16, as the [`half`] crate has it; products are accumulated in 32 bits.
impl Scalar for half::bf16 {
    const DATA_TYPE: DataType = DataType::Bf16;
    #[inline]
    fn to_f64(self) -> f64 {
        // It is the upper half of an `f32`. The crate's own conversion is no part of the caller's code.
        f64::from(f32::from_bits(u32::from(self.to_bits()) << 16))
    }
}

impl GemmShape {
    /// One product of packed matrices of `T`, nothing transposed: [`GemmShape::new`] with `T`'s data type.
    #[must_use]
    pub const fn of<T: Scalar>(m: usize, n: usize, k: usize) -> Self {
        Self::new(T::DATA_TYPE, m, n, k)
    }

    /// One product of packed matrices, nothing transposed, with factors of `T` and a result of `R`:
    /// [`GemmShape::with_output`] by types.
    ///
    /// ```
    /// use half::bf16;
    /// use highwater_hal::{DataType, GemmShape};
    ///
    /// let shape = GemmShape::mixed::<bf16, f32>(4, 5, 6);
    /// assert_eq!((shape.data_type, shape.output), (DataType::Bf16, DataType::F32));
    /// ```
    #[must_use]
    pub const fn mixed<T: Scalar, R: Scalar>(m: usize, n: usize, k: usize) -> Self {
        Self::of::<T>(m, n, k).with_output(R::DATA_TYPE)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::Scalar;

    #[test]
    fn every_bfloat16_is_converted_as_its_crate_does() {
        for bits in 0..=u16::MAX {
            let number = bf16::from_bits(bits);
            assert_eq!(Scalar::to_f64(number).to_bits(), bf16::to_f64(number).to_bits(), "{bits:#x}");
        }
    }
}
