//! Types of the elements of buffers and products.

use bytemuck::Pod;

use crate::blas::{DataType, GemmShape};

/// Types of which every bit pattern is a value, so that devices may copy and overwrite them. Implemented for every type that is
/// `Pod`, `Send` and `Sync`.
///
/// Memory has two more conditions. An allocation for a zero-sized type returns `InvalidArgument`. Page-locked memory for a type
/// whose alignment is above 64 bytes does not compile.
pub trait Element: Pod + Send + Sync {}

impl<T: Pod + Send + Sync> Element for T {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Types of numbers that BLAS multiplies.
pub trait Scalar: Element + sealed::Sealed {
    /// The name of the type in the traits.
    const DATA_TYPE: DataType;
    /// Converts the number, exactly, to the type of `alpha` and `beta`.
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

/// IEEE half precision of the [`half`] crate. Products sum in 32 bits.
impl Scalar for half::f16 {
    const DATA_TYPE: DataType = DataType::F16;
    #[inline]
    fn to_f64(self) -> f64 {
        Self::to_f64(self)
    }
}

/// bfloat16 of the [`half`] crate. Products sum in 32 bits.
impl Scalar for half::bf16 {
    const DATA_TYPE: DataType = DataType::Bf16;
    #[inline]
    fn to_f64(self) -> f64 {
        // It is the upper half of an `f32`. Unlike the crate's own conversion, this is inlined in the caller's code.
        f64::from(f32::from_bits(u32::from(self.to_bits()) << 16))
    }
}

impl GemmShape {
    /// Returns the shape of one product of packed matrices of `T`, without transposition. See [`GemmShape::new`].
    #[must_use]
    pub const fn of<T: Scalar>(m: usize, n: usize, k: usize) -> Self {
        Self::new(T::DATA_TYPE, m, n, k)
    }

    /// Returns the shape of one product of packed matrices, without transposition, with factors of `T` and a result of `R`.
    /// See [`GemmShape::with_output`].
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
