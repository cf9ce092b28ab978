//! [`DType`]: the types of elements, by the names that NumPy and PyTorch give them.

use highwater::half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::{PyComplex, PyComplexMethods, PyString};

use crate::arrays::short;
use crate::error::invalid;

macro_rules! types {
    ($($name:ident $text:literal $bytes:literal $typestr:literal $code:literal,)+) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum DType { $($name,)+ }

        impl DType {
            const ALL: &[Self] = &[$(Self::$name),+];

            /// Returns NumPy's name.
            pub(crate) fn name(self) -> &'static str { match self { $(Self::$name => $text),+ } }
            /// Returns the size of an element.
            pub(crate) fn bytes(self) -> usize { match self { $(Self::$name => $bytes),+ } }
            /// Returns the type in the array interface. NumPy knows no bfloat16, and sees its bits.
            pub(crate) fn typestr(self) -> &'static str { match self { $(Self::$name => $typestr),+ } }
            /// Returns the code of the type in DLPack.
            pub(crate) fn dlpack_code(self) -> u8 { match self { $(Self::$name => $code),+ } }
        }
    };
}

types! {
    Bool "bool" 1 "|b1" 6,
    Int8 "int8" 1 "|i1" 0,
    Int16 "int16" 2 "<i2" 0,
    Int32 "int32" 4 "<i4" 0,
    Int64 "int64" 8 "<i8" 0,
    UInt8 "uint8" 1 "|u1" 1,
    UInt16 "uint16" 2 "<u2" 1,
    UInt32 "uint32" 4 "<u4" 1,
    UInt64 "uint64" 8 "<u8" 1,
    Float16 "float16" 2 "<f2" 2,
    BFloat16 "bfloat16" 2 "<u2" 4,
    Float32 "float32" 4 "<f4" 2,
    Float64 "float64" 8 "<f8" 2,
    Complex64 "complex64" 8 "<c8" 5,
    Complex128 "complex128" 16 "<c16" 5,
}

impl DType {
    /// Returns the type that an object names: a string, a type of NumPy or PyTorch, or `float`, `int` or `bool`.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let is_text = object.is_instance_of::<PyString>();
        let text = if is_text {
            object.to_string()
        } else if let Some(name) = object.getattr_opt("name")?.or(object.getattr_opt("__name__")?) {
            name.to_string()
        } else {
            object.to_string()
        };
        let name = match text.strip_prefix("torch.").unwrap_or(&text) {
            "float" => "float64",
            "int" => "int64",
            name => name,
        };
        // A string has no `isnative`. The lookup of a missing attribute takes longer than the rest.
        let native = if is_text { None } else { object.getattr_opt("isnative")? };
        if native.is_some_and(|native| native.is_truthy().is_ok_and(|is_native| !is_native)) {
            let message = format!("the type {} has the other byte order", short(object));
            return Err(invalid("dtype", message, "pass the type `dtype.newbyteorder(\"=\")`"));
        }
        Self::named(name).ok_or_else(|| {
            let expected = Self::names().join(", ");
            let message = format!("`{}` is no type of elements; expected one of {expected}", short(object));
            invalid("dtype", message, "pass a name such as \"float32\", or a type of NumPy or PyTorch")
        })
    }

    /// Returns the names of all types.
    pub(crate) fn names() -> Vec<&'static str> {
        Self::ALL.iter().map(|dtype| dtype.name()).collect()
    }

    /// Returns the type of a name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// Returns the type with these fields in DLPack.
    pub(crate) fn of_dlpack(code: u8, bits: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.dlpack_code() == code && dtype.bytes() * 8 == usize::from(bits))
    }

    /// Returns the type as NumPy stores it.
    pub(crate) fn numpy_name(self) -> &'static str {
        if self == Self::BFloat16 { "uint16" } else { self.name() }
    }

    /// Returns the bytes of a number as this type. Raises `InvalidArgument` for a number that the type does not hold.
    pub(crate) fn bytes_of(self, value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
        let refused = || {
            let message = format!("{} is no {}", short(value), self.name());
            let hint = match self {
                Self::Bool => "pass True or False",
                Self::Float16 | Self::BFloat16 | Self::Float32 | Self::Float64 => {
                    "pass a number in the range of the type"
                }
                Self::Complex64 | Self::Complex128 => "pass a number in the range of the type's parts",
                _ => "pass a whole number in the range of the buffer's type",
            };
            invalid("fill", message, hint)
        };
        macro_rules! whole {
            ($type:ty) => {
                value.extract::<$type>().map_err(|_| refused())?.to_ne_bytes().to_vec()
            };
        }
        macro_rules! rounded {
            ($number:expr, $round:expr) => {{
                let number: f64 = $number;
                let rounded = $round(number);
                // The range ends where finite numbers round to infinity.
                if number.is_finite() && !rounded.is_finite() {
                    return Err(refused());
                }
                rounded.to_ne_bytes()
            }};
        }
        let real = || value.extract::<f64>().map_err(|_| refused());
        let parts = || match value.cast::<PyComplex>() {
            Ok(number) => Ok((number.real(), number.imag())),
            Err(_) => real().map(|real| (real, 0.0)),
        };
        let single = |number: f64| number as f32;
        Ok(match self {
            Self::Bool => {
                let is = |other: u8| value.eq(other).unwrap_or(false);
                match (is(0), is(1)) {
                    (true, _) => vec![0],
                    (_, true) => vec![1],
                    _ => return Err(refused()),
                }
            }
            Self::Int8 => whole!(i8),
            Self::Int16 => whole!(i16),
            Self::Int32 => whole!(i32),
            Self::Int64 => whole!(i64),
            Self::UInt8 => whole!(u8),
            Self::UInt16 => whole!(u16),
            Self::UInt32 => whole!(u32),
            Self::UInt64 => whole!(u64),
            Self::Float16 => rounded!(real()?, f16::from_f64).to_vec(),
            Self::BFloat16 => rounded!(real()?, bf16::from_f64).to_vec(),
            Self::Float32 => rounded!(real()?, single).to_vec(),
            Self::Float64 => real()?.to_ne_bytes().to_vec(),
            Self::Complex64 => {
                let (real, imaginary) = parts()?;
                [rounded!(real, single), rounded!(imaginary, single)].concat()
            }
            Self::Complex128 => {
                let (real, imaginary) = parts()?;
                [real.to_ne_bytes(), imaginary.to_ne_bytes()].concat()
            }
        })
    }
}
