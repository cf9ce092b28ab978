//! [`Stream::matmul`]: a product of matrices that know their shape and layout.
//!
//! BLAS is column-major. A row-major matrix is the transpose of a column-major one with the same values, so every layout is
//! a choice of transposes and of the order of the factors: `C = A * B` and `C^T = B^T * A^T` are one product. No value is
//! moved, and the product takes the path of [`BlasLease::gemm`](crate::BlasLease::gemm).

use crate::buffer::DeviceSlice;
use crate::numerics::Numerics;
use crate::product::Product;
use crate::stream::Stream;
use highwater_hal::{Error, ErrorKind, GemmShape, Result, Scalar, Transpose, counted};

const OPERATION: &str = "matmul";

/// A matrix in a device buffer: its values, rows, columns and layout.
///
/// Nothing is checked here; [`Matmul::run`] checks the shapes and that the buffer holds the matrix.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'b, T: Scalar> {
    values: DeviceSlice<'b, T>,
    rows: usize,
    columns: usize,
    /// Values from one column to the next (column-major), or from one row to the next (row-major).
    leading: usize,
    is_row_major: bool,
}

impl<'b, T: Scalar> Matrix<'b, T> {
    /// Describes a matrix that is stored column after column, as BLAS stores it.
    #[must_use]
    pub fn column_major(values: impl Into<DeviceSlice<'b, T>>, rows: usize, columns: usize) -> Self {
        Self { values: values.into(), rows, columns, leading: rows.max(1), is_row_major: false }
    }

    /// Describes a matrix that is stored row after row, as C, NumPy and PyTorch store it.
    #[must_use]
    pub fn row_major(values: impl Into<DeviceSlice<'b, T>>, rows: usize, columns: usize) -> Self {
        Self::column_major(values, columns, rows).transposed()
    }

    /// Sets the leading dimension: the values from one column to the next, or from one row to the next if the matrix is
    /// row-major. By default, columns or rows follow each other without a gap.
    #[must_use]
    pub fn with_leading_dimension(mut self, values: usize) -> Self {
        self.leading = values;
        self
    }

    /// Returns the transpose of this matrix, over the same values.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, is_row_major: !self.is_row_major, ..self }
    }

    /// Returns the bytes from the first value to the end of the last.
    ///
    /// # Errors
    /// `InvalidArgument` if no matrix has this leading dimension or this size, or the buffer does not hold the matrix.
    fn bytes(&self, name: &str) -> Result<usize> {
        let Self { values, rows, columns, leading, is_row_major } = *self;
        let (layout, line, (len, count)) = match is_row_major {
            true => ("row-major", "column", (columns, rows)),
            false => ("column-major", "row", (rows, columns)),
        };
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, OPERATION, message);
        if leading < len.max(1) {
            return Err(invalid(format!(
                "{name} is {layout} with {}, but its leading dimension is {leading}",
                counted(len, line)
            ))
            .with_hint(format!("the leading dimension of a {layout} matrix is at least its {line}s, and at least 1")));
        }
        let reach = match count {
            0 => Some(0),
            _ if len == 0 => Some(0),
            _ => (count - 1).checked_mul(leading).and_then(|last| last.checked_add(len)),
        };
        let bytes = reach.and_then(|reach| Some((reach, reach.checked_mul(size_of::<T>())?)));
        let Some((reach, bytes)) = bytes.filter(|&(_, bytes)| isize::try_from(bytes).is_ok()) else {
            return Err(invalid(format!("{name} is {rows} x {columns}, {layout}, and exceeds the address space"))
                .with_hint("check the rows, the columns and the leading dimension"));
        };
        if values.len() < reach {
            let (reach, has) = (counted(reach, "value"), values.len());
            let message =
                format!("{name} is {rows} x {columns}, {layout}, and reaches {reach}, but its buffer has {has}");
            return Err(invalid(message)
                .with_hint("pass a larger buffer, or check the rows, the columns and the leading dimension"));
        }
        Ok(bytes)
    }
}

/// A product that [`Stream::matmul`] describes and [`Matmul::run`] enqueues.
#[derive(Debug, Clone, Copy)]
#[must_use = "a product is enqueued by `run`"]
pub struct Matmul<'s, 'b, T: Scalar, R: Scalar> {
    stream: &'s Stream,
    a: Matrix<'b, T>,
    b: Matrix<'b, T>,
    c: Matrix<'b, R>,
    /// Alpha and beta.
    scale: (f64, f64),
    numerics: Option<Numerics>,
}

impl Stream {
    /// Describes the product `C = A * B`, which [`Matmul::run`] enqueues.
    ///
    /// Each matrix has a layout of its own, in any combination. C has the type of the factors, or `f32` if those are
    /// `f16` or `bf16`. For batches, or to keep one lease for many products, call
    /// [`BlasLease::gemm`](crate::BlasLease::gemm); it is the same product.
    ///
    /// ```
    /// use highwater_core::{Matrix, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let a = stream.upload(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    /// let b = stream.upload(&[1.0_f32, 0.0, 2.0])?;
    /// let c = stream.upload(&[100.0_f32, 100.0])?;
    ///
    /// let a = Matrix::row_major(&a, 2, 3); // Rows 1 2 3 and 4 5 6.
    /// let b = Matrix::row_major(&b, 1, 3).transposed(); // A column.
    /// stream.matmul(a, b, Matrix::row_major(&c, 2, 1)).scale(1.0, 1.0).run()?;
    /// assert_eq!(stream.download(&c)?, [107.0, 116.0]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    pub fn matmul<'s, 'b, T: Scalar, R: Scalar>(
        &'s self,
        a: Matrix<'b, T>,
        b: Matrix<'b, T>,
        c: Matrix<'b, R>,
    ) -> Matmul<'s, 'b, T, R> {
        Matmul { stream: self, a, b, c, scale: (1.0, 0.0), numerics: None }
    }
}

impl<T: Scalar, R: Scalar> Matmul<'_, '_, T, R> {
    /// Computes `C = alpha * A * B + beta * C` instead. With a `beta` of 0, the old values of C are not read.
    pub fn scale(mut self, alpha: R, beta: R) -> Self {
        self.scale = (alpha.to_f64(), beta.to_f64());
        self
    }

    /// Sets the policy for this product, before the thread's and the runtime's.
    pub fn numerics(mut self, policy: Numerics) -> Self {
        self.numerics = Some(policy);
        self
    }

    /// Enqueues the product. Returns without waiting for it, and allocates nothing.
    ///
    /// # Errors
    /// `InvalidArgument` if the shapes do not fit together; else the errors of
    /// [`BlasLease::gemm_mixed`](crate::BlasLease::gemm_mixed).
    pub fn run(self) -> Result<()> {
        let Self { a, b, c, .. } = self;
        if a.columns != b.rows || c.rows != a.rows || c.columns != b.columns {
            return Err(self.misfit());
        }
        // A row-major C is the transpose of a column-major one: its product is that of the transposed factors, in the
        // other order.
        let (a, b, c) = if c.is_row_major { (b.transposed(), a.transposed(), c.transposed()) } else { (a, b, c) };
        let transpose = |is_row_major| if is_row_major { Transpose::Yes } else { Transpose::No };
        let mut shape = GemmShape::mixed::<T, R>(c.rows, c.columns, a.columns)
            .with_leading_dimensions(a.leading, b.leading, c.leading);
        shape.transpose_a = transpose(a.is_row_major);
        shape.transpose_b = transpose(b.is_row_major);
        let mut lease = self.stream.blas()?;
        if let Some(policy) = self.numerics {
            lease.set_numerics(policy);
        }
        let unscaled = (R::zeroed(), R::zeroed());
        let mut product = Product::new::<T, R>(OPERATION, &shape, unscaled, a.values, b.values, c.values);
        product.gemm = product.gemm.with_scale(self.scale.0, self.scale.1);
        lease.enqueue(&product).map_err(|error| self.explain(error))
    }

    /// Returns the error in the terms of the caller. The product may have swapped the factors, and knows no layouts.
    #[cold]
    fn explain(&self, error: Error) -> Error {
        let Self { a, b, c, .. } = self;
        if error.kind() != ErrorKind::InvalidArgument {
            return error;
        }
        let check = || {
            let (of_a, of_b, of_c) = (a.bytes("A")?, b.bytes("B")?, c.bytes("C")?);
            for (name, factor, bytes) in [("A", a, of_a), ("B", b, of_b)] {
                if c.values.untyped().overlaps(of_c, &factor.values.untyped(), bytes) {
                    // The address of released memory may belong to another buffer by now.
                    for block in [c.values.block(), factor.values.block()] {
                        block.check_usable(OPERATION)?;
                    }
                    return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, format!("C overlaps {name}"))
                        .with_hint("write to a buffer of its own"));
                }
            }
            Ok(())
        };
        check().err().unwrap_or(error)
    }

    #[cold]
    fn misfit(&self) -> Error {
        let Self { a, b, c, .. } = self;
        let message = format!(
            "A is {} x {}, B is {} x {}, C is {} x {}",
            a.rows, a.columns, b.rows, b.columns, c.rows, c.columns
        );
        Error::new(ErrorKind::InvalidArgument, OPERATION, message)
            .with_hint("for an A of m x k and a B of k x n, pass a C of m x n; `transposed` swaps rows and columns")
    }
}

#[cfg(test)]
mod tests {
    use highwater_hal::half::f16;
    use highwater_mock::{MockGpu, MockOptions};

    use super::*;
    use crate::{DeviceBuffer, Runtime};

    const M: usize = 3;
    const N: usize = 4;
    const K: usize = 2;

    fn stream() -> Stream {
        Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap().device(0).unwrap().create_stream().unwrap()
    }

    /// A way to store a matrix.
    #[derive(Debug, Clone, Copy)]
    struct Layout {
        is_row_major: bool,
        /// Values between two columns or rows.
        gap: usize,
    }

    impl Layout {
        const ALL: [Self; 4] = [
            Self { is_row_major: false, gap: 0 },
            Self { is_row_major: false, gap: 3 },
            Self { is_row_major: true, gap: 0 },
            Self { is_row_major: true, gap: 2 },
        ];

        fn leading(self, rows: usize, columns: usize) -> usize {
            self.gap + if self.is_row_major { columns } else { rows }
        }

        fn place(self, (row, column): (usize, usize), rows: usize, columns: usize) -> usize {
            let leading = self.leading(rows, columns);
            if self.is_row_major { row * leading + column } else { column * leading + row }
        }

        fn store(
            self,
            stream: &Stream,
            rows: usize,
            columns: usize,
            value: fn(usize, usize) -> f32,
        ) -> DeviceBuffer<f32> {
            let mut values = vec![-1.0; 40];
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                values[self.place((row, column), rows, columns)] = value(row, column);
            }
            stream.upload(&values).unwrap()
        }

        fn matrix(self, values: &DeviceBuffer<f32>, rows: usize, columns: usize) -> Matrix<'_, f32> {
            let matrix = match self.is_row_major {
                true => Matrix::row_major(values, rows, columns),
                false => Matrix::column_major(values, rows, columns),
            };
            matrix.with_leading_dimension(self.leading(rows, columns))
        }
    }

    #[test]
    fn every_combination_of_layouts_gives_the_same_product() {
        let a = |row, column| (1 + row * K + column) as f32;
        let b = |row, column| (row * N) as f32 - column as f32;
        let stream = stream();
        for [of_a, of_b, of_c] in combinations() {
            let (left, right) = (of_a.store(&stream, M, K, a), of_b.store(&stream, K, N, b));
            let result = of_c.store(&stream, M, N, |_, _| 10.0);
            let product =
                stream.matmul(of_a.matrix(&left, M, K), of_b.matrix(&right, K, N), of_c.matrix(&result, M, N));
            product.scale(2.0, 1.0).run().unwrap();
            let values = stream.download(&result).unwrap();
            let mut untouched = values.clone();
            for (row, column) in (0..M).flat_map(|row| (0..N).map(move |column| (row, column))) {
                let sum: f32 = (0..K).map(|k| a(row, k) * b(k, column)).sum();
                let place = of_c.place((row, column), M, N);
                assert_eq!(values[place], 2.0 * sum + 10.0, "{row}, {column} of {of_a:?} {of_b:?} {of_c:?}");
                untouched[place] = -1.0;
            }
            assert_eq!(untouched, [-1.0; 40]);
        }
    }

    fn combinations() -> impl Iterator<Item = [Layout; 3]> {
        let all = || Layout::ALL.into_iter();
        all().flat_map(move |a| all().flat_map(move |b| all().map(move |c| [a, b, c])))
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused_with_their_numbers() {
        let stream = stream();
        let values = stream.upload(&[0.0_f32; 100]).unwrap();
        let matrix = |rows, columns| Matrix::row_major(&values, rows, columns);
        for (a, b, c) in [((2, 3), (4, 2), (2, 2)), ((2, 3), (3, 2), (3, 2)), ((2, 3), (3, 2), (2, 3))] {
            let error = stream.matmul(matrix(a.0, a.1), matrix(b.0, b.1), matrix(c.0, c.1)).run().unwrap_err();
            assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidArgument, "matmul"));
            assert!(error.message().contains(&format!("A is {} x {}", a.0, a.1)), "{error}");
        }
    }

    #[test]
    fn errors_name_the_matrix_that_the_caller_passed() {
        let stream = stream();
        let [short, full, other, result] = [6, 9, 9, 9].map(|len| stream.upload(&vec![0.0_f32; len]).unwrap());
        for is_row_major in [false, true] {
            let layout = Layout { is_row_major, gap: 0 };
            let refused = |wrong: usize, matrix: Matrix<'_, f32>| {
                let [mut a, mut b, mut c] = [&full, &other, &result].map(|values| layout.matrix(values, 3, 3));
                *[&mut a, &mut b, &mut c][wrong] = matrix;
                let error = stream.matmul(a, b, c).run().unwrap_err();
                assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidArgument, "matmul"));
                assert!(!error.hint().is_empty(), "{error}");
                error.message().to_owned()
            };
            let (name, line) = if is_row_major { ("row-major", "columns") } else { ("column-major", "rows") };
            for (wrong, matrix) in ["A", "B", "C"].into_iter().enumerate() {
                assert_eq!(
                    refused(wrong, layout.matrix(&short, 3, 3)),
                    format!("{matrix} is 3 x 3, {name}, and reaches 9 values, but its buffer has 6")
                );
                assert_eq!(
                    refused(wrong, layout.matrix(&full, 3, 3).with_leading_dimension(2)),
                    format!("{matrix} is {name} with 3 {line}, but its leading dimension is 2")
                );
                assert_eq!(
                    refused(wrong, layout.matrix(&full, 3, 3).with_leading_dimension(usize::MAX)),
                    format!("{matrix} is 3 x 3, {name}, and exceeds the address space")
                );
            }
            assert_eq!(refused(2, layout.matrix(&full, 3, 3)), "C overlaps A");
            assert_eq!(refused(2, layout.matrix(&other, 3, 3)), "C overlaps B");
        }
    }

    #[test]
    fn halves_give_a_result_of_32_bits_and_empty_matrices_give_none() {
        let stream = stream();
        let two = stream.upload(&[f16::from_f32(2.0); 300]).unwrap();
        let c = stream.upload(&[0.5_f32]).unwrap();
        let product = |k| {
            stream.matmul(Matrix::row_major(&two, 1, k), Matrix::row_major(&two, k, 1), Matrix::row_major(&c, 1, 1))
        };
        product(300).numerics(Numerics::new().allow_nondeterminism()).run().unwrap();
        assert_eq!(stream.download(&c).unwrap(), [1200.0]);
        product(0).scale(1.0, 0.5).run().unwrap();
        assert_eq!(stream.download(&c).unwrap(), [600.0]);
    }
}
