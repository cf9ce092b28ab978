//! Parts of matrices, as rows at equal distances.

use std::ops::Range;

use highwater::CopyShape;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PySlice, PyTuple};

use crate::arrays::short;
use crate::dtype::DType;
use crate::error::invalid;

/// The operation that copies them.
pub(crate) const OPERATION: &str = "copy_2d";

/// The rows of both sides of a copy. A range goes from the first row to the end of the last.
pub(crate) struct Rows {
    /// The values of the source.
    pub(crate) src: Range<usize>,
    /// The values of the destination.
    pub(crate) dst: Range<usize>,
    /// The rows in bytes.
    pub(crate) shape: CopyShape,
    dtype: DType,
}

impl Rows {
    /// Returns the bytes of the source.
    pub(crate) fn src_bytes(&self) -> Range<usize> {
        self.src.start * self.dtype.bytes()..self.src.end * self.dtype.bytes()
    }

    /// Returns the bytes of the destination.
    pub(crate) fn dst_bytes(&self) -> Range<usize> {
        self.dst.start * self.dtype.bytes()..self.dst.end * self.dtype.bytes()
    }
}

/// A side of a copy: the shape and the type of all values, and the part of them.
type Side<'a, 'py> = (&'a [usize], DType, Option<&'a Bound<'py, PyAny>>);

/// A part of one side.
struct Part {
    /// The lengths of the dimensions.
    lengths: Vec<usize>,
    /// The first value.
    start: usize,
    /// Values of each row.
    width: usize,
    /// Values from one row to the next.
    pitch: usize,
}

/// Returns the rows of a copy between two parts.
pub(crate) fn between(src: Side<'_, '_>, dst: Side<'_, '_>) -> PyResult<Rows> {
    if src.1 != dst.1 {
        let message = format!("the source has values of {}, the destination of {}", src.1.name(), dst.1.name());
        return Err(invalid(OPERATION, message, "pass memory of the same type on both sides"));
    }
    let (from, to) = (Part::of("src", src)?, Part::of("dst", dst)?);
    if from.lengths != to.lengths {
        let message = format!(
            "the part of the source has the shape {:?}, that of the destination {:?}",
            from.lengths, to.lengths
        );
        return Err(invalid(
            OPERATION,
            message,
            "pass parts of the same shape; as in NumPy, a slice ends at the last row or column",
        ));
    }
    let dtype = src.1;
    let rows = CopyShape::new(from.width, from.lengths[0]).with_src_pitch(from.pitch).with_dst_pitch(to.pitch);
    let range = |start, values: Option<usize>| start..start + values.unwrap_or(0);
    let (src, dst) = (range(from.start, rows.src_bytes()), range(to.start, rows.dst_bytes()));
    let [width, src_pitch, dst_pitch] = [from.width, from.pitch, to.pitch].map(|values| values * dtype.bytes());
    let shape = CopyShape::new(width, rows.height).with_src_pitch(src_pitch).with_dst_pitch(dst_pitch);
    Ok(Rows { src, dst, shape, dtype })
}

impl Part {
    fn of(name: &str, (shape, _, part): Side<'_, '_>) -> PyResult<Self> {
        let [all_rows, all_columns, inner @ ..] = shape else {
            let message = format!("{name} has the shape {shape:?}");
            return Err(invalid(OPERATION, message, "pass memory with rows and columns: of two or more dimensions"));
        };
        let mut taken = [*all_rows, *all_columns].map(|count| Taken { start: 0, step: 1, count });
        if let Some(part) = part {
            for (slice, taken) in slices(name, part)?.iter().zip(&mut taken) {
                *taken = Taken::of(name, slice, taken.count)?;
            }
        }
        let [rows, columns] = taken;
        if columns.step != 1 {
            let message = format!("the columns of {name} have the step {}, expected 1", columns.step);
            return Err(invalid(OPERATION, message, "pass columns that are adjacent; rows may have a step"));
        }
        let cell: usize = inner.iter().product();
        let lengths = [&[rows.count, columns.count], inner].concat();
        let (row, width) = (all_columns * cell, columns.count * cell);
        if rows.count == 0 || width == 0 {
            return Ok(Self { lengths, start: 0, width, pitch: width });
        }
        Ok(Self { lengths, start: rows.start * row + columns.start * cell, width, pitch: rows.step * row })
    }
}

/// The values that a slice takes from a dimension.
#[derive(Clone, Copy)]
struct Taken {
    start: usize,
    step: usize,
    count: usize,
}

impl Taken {
    fn of(name: &str, slice: &Bound<'_, PySlice>, length: usize) -> PyResult<Self> {
        let found = slice.indices(length.try_into()?)?;
        let (Ok(start), Ok(step)) = (usize::try_from(found.start), usize::try_from(found.step)) else {
            let message = format!("the part of {name} has the step {}, expected a positive one", found.step);
            return Err(invalid(OPERATION, message, "pass slices with a positive step"));
        };
        let count = found.slicelength;
        // The step of one row or column does not matter, and may be any number.
        Ok(Self { start, step: if count <= 1 { 1 } else { step }, count })
    }
}

/// Returns the slices of the rows and of the columns, as far as the part has them.
fn slices<'py>(name: &str, part: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PySlice>>> {
    let found = match part.cast::<PyTuple>() {
        Ok(both) if both.len() <= 2 => both.iter().map(|slice| slice.cast_into::<PySlice>().ok()).collect(),
        Ok(_) => None,
        Err(_) => part.cast::<PySlice>().ok().map(|slice| vec![slice.clone()]),
    };
    found.ok_or_else(|| {
        let found = short(part);
        PyTypeError::new_err(format!(
            "the part of {name} is `{found}`, expected a slice of rows, or a tuple of a slice of rows and one of columns"
        ))
    })
}
