//! The kernels behind a product, on private buffers: read from device memory, multiply, write back.
//!
//! A product is two commands. *Multiply* leaves `op(A) * op(B)` in the workspace; *finish* takes it from there, scales,
//! adds the old C, applies the epilogue and writes the result. Between the two the intermediate result lies in ordinary
//! device memory, so whoever else writes the workspace meanwhile spoils it, as on hardware. A product that is larger
//! than its workspace is cut into panels, with two commands each.
//!
//! Equal calls give equal bits: the order of every sum depends only on the shape and the size of the workspace.

use std::ops::{Add, Mul};
use std::sync::Arc;

use bytemuck::Pod;
use highwater_core::{DataType, DevicePtr, Epilogue, GemmShape, StridedBatch, Transpose};

use crate::device::Device;
use crate::device_memory::DeviceMemory;

/// The part of a product that one pair of commands computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Panel {
    /// First product of the batch, and how many.
    pub(crate) batch: usize,
    pub(crate) batches: usize,
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) column: usize,
    pub(crate) columns: usize,
}

/// Cuts a product that is not empty into panels of at most `capacity` elements, which is at least 1.
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

/// A workspace that belongs to a handle. Products that use it keep it; the last one to go gives it back.
#[derive(Debug)]
pub(crate) struct OwnWorkspace {
    pub(crate) engine: Arc<crate::stream::Engine>,
    pub(crate) device: u32,
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: usize,
}

impl OwnWorkspace {
    fn device(&self) -> &Device {
        &self.engine.devices[self.device as usize]
    }
}

impl Drop for OwnWorkspace {
    fn drop(&mut self) {
        self.device().free_own(self.ptr, self.bytes as u64);
    }
}

/// One product, checked: the offsets of its matrices in the device's memory, in bytes.
#[derive(Debug)]
pub(crate) struct Product {
    pub(crate) shape: GemmShape,
    pub(crate) alpha: f64,
    pub(crate) beta: f64,
    pub(crate) a: usize,
    pub(crate) b: usize,
    pub(crate) c: usize,
    pub(crate) d: usize,
    pub(crate) bias: Option<usize>,
    pub(crate) epilogue: Epilogue,
    pub(crate) workspace: usize,
    /// Keeps the workspace until the last command has run, where it is the handle's own.
    #[expect(dead_code, reason = "held for its destructor")]
    pub(crate) own: Option<Arc<OwnWorkspace>>,
}

/// An element type that products are computed in.
trait Element: Pod + Add<Output = Self> + Mul<Output = Self> + PartialOrd {
    fn from_f64(value: f64) -> Self;

    /// `c = a * b` with c column-major and packed; strides in elements.
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
    );
}

/// Distance between rows and between columns, in elements.
#[derive(Debug, Clone, Copy)]
struct Strides {
    row: usize,
    column: usize,
}

macro_rules! element {
    ($type:ty, $gemm:path) => {
        impl Element for $type {
            fn from_f64(value: f64) -> Self {
                value as Self
            }

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
                assert!(
                    m > 0
                        && k > 0
                        && n > 0
                        && reaches(m, k, a_strides) <= a.len()
                        && reaches(k, n, b_strides) <= b.len()
                );
                assert!(m * n <= c.len());
                // SAFETY: the sizes were just checked against the slices, and `c` is borrowed exclusively. Strides are
                // below the lengths of slices, so they fit `isize`.
                unsafe {
                    $gemm(
                        m,
                        k,
                        n,
                        1.0,
                        a.as_ptr(),
                        a_strides.row as isize,
                        a_strides.column as isize,
                        b.as_ptr(),
                        b_strides.row as isize,
                        b_strides.column as isize,
                        0.0,
                        c.as_mut_ptr(),
                        1,
                        m as isize,
                    );
                }
            }
        }
    };
}

element!(f32, matrixmultiply::sgemm);
element!(f64, matrixmultiply::dgemm);

impl Product {
    /// Executes the first half.
    pub(crate) fn multiply(&self, memory: &DeviceMemory, panel: Panel) {
        match self.shape.data_type {
            DataType::F64 => self.multiply_as::<f64>(memory, panel),
            _ => self.multiply_as::<f32>(memory, panel),
        }
    }

    /// Executes the second half.
    pub(crate) fn finish(&self, memory: &DeviceMemory, panel: Panel) {
        match self.shape.data_type {
            DataType::F64 => self.finish_as::<f64>(memory, panel),
            _ => self.finish_as::<f32>(memory, panel),
        }
    }

    /// Executes both halves, without a workspace.
    pub(crate) fn multiply_and_finish(&self, memory: &DeviceMemory) {
        match self.shape.data_type {
            DataType::F64 => self.multiply_and_finish_as::<f64>(memory),
            _ => self.multiply_and_finish_as::<f32>(memory),
        }
    }

    fn multiply_as<T: Element>(&self, memory: &DeviceMemory, panel: Panel) {
        let length = panel.rows * panel.columns;
        for index in 0..panel.batches {
            let product = self.product::<T>(memory, panel, panel.batch + index);
            memory.write_slice(self.workspace + index * length * size_of::<T>(), &product);
        }
    }

    fn finish_as<T: Element>(&self, memory: &DeviceMemory, panel: Panel) {
        let length = panel.rows * panel.columns;
        let mut product = vec![T::zeroed(); length];
        for index in 0..panel.batches {
            memory.read_slice(self.workspace + index * length * size_of::<T>(), &mut product);
            self.store(memory, panel, panel.batch + index, &product);
        }
    }

    fn multiply_and_finish_as<T: Element>(&self, memory: &DeviceMemory) {
        for panel in panels(&self.shape, self.shape.m * self.shape.n) {
            let product = self.product::<T>(memory, panel, panel.batch);
            self.store(memory, panel, panel.batch, &product);
        }
    }

    /// Whether A and B have no part in the result.
    fn ignores_factors(&self) -> bool {
        self.alpha == 0.0 || self.shape.k == 0
    }

    fn strides(&self) -> StridedBatch {
        self.shape.batch.unwrap_or(StridedBatch { count: 1, stride_a: 0, stride_b: 0, stride_c: 0 })
    }

    /// `op(A) * op(B)` of one product of the batch, column-major and packed.
    fn product<T: Element>(&self, memory: &DeviceMemory, panel: Panel, batch: usize) -> Vec<T> {
        let Panel { row, rows, column, columns, .. } = panel;
        let mut product = vec![T::zeroed(); rows * columns];
        if self.ignores_factors() {
            return product;
        }
        let (shape, strides, k) = (&self.shape, self.strides(), self.shape.k);
        let a = self.a + batch * strides.stride_a * size_of::<T>();
        let b = self.b + batch * strides.stride_b * size_of::<T>();
        let (a, a_strides) = match shape.transpose_a {
            Transpose::No => (load::<T>(memory, a, shape.lda, (row, rows), (0, k)), Strides { row: 1, column: rows }),
            Transpose::Yes => (load::<T>(memory, a, shape.lda, (0, k), (row, rows)), Strides { row: k, column: 1 }),
        };
        let (b, b_strides) = match shape.transpose_b {
            Transpose::No => {
                (load::<T>(memory, b, shape.ldb, (0, k), (column, columns)), Strides { row: 1, column: k })
            }
            Transpose::Yes => {
                (load::<T>(memory, b, shape.ldb, (column, columns), (0, k)), Strides { row: columns, column: 1 })
            }
        };
        T::multiply(rows, k, columns, &a, a_strides, &b, b_strides, &mut product);
        product
    }

    /// `D = epilogue(alpha * product + beta * C)` for one product of the batch.
    fn store<T: Element>(&self, memory: &DeviceMemory, panel: Panel, batch: usize, product: &[T]) {
        let Panel { row, rows, column, columns, .. } = panel;
        let (alpha, beta) = (T::from_f64(self.alpha), T::from_f64(self.beta));
        let place = |base: usize, column: usize| {
            base + (batch * self.strides().stride_c + column * self.shape.ldc + row) * size_of::<T>()
        };
        let bias = self.bias.filter(|_| self.epilogue.has_bias()).map(|bias| {
            let mut values = vec![T::zeroed(); rows];
            memory.read_slice(bias + row * size_of::<T>(), &mut values);
            values
        });
        let mut old = vec![T::zeroed(); rows];
        let mut result = vec![T::zeroed(); rows];
        for index in 0..columns {
            if self.beta != 0.0 {
                memory.read_slice(place(self.c, column + index), &mut old);
            }
            for (i, value) in result.iter_mut().enumerate() {
                let mut sum = T::zeroed();
                if !self.ignores_factors() {
                    sum = alpha * product[index * rows + i];
                }
                if self.beta != 0.0 {
                    sum = sum + beta * old[i];
                }
                if let Some(bias) = &bias {
                    sum = sum + bias[i];
                }
                // A NaN stays one.
                *value = if self.epilogue == Epilogue::BiasRelu && sum < T::zeroed() { T::zeroed() } else { sum };
            }
            memory.write_slice(place(self.d, column + index), &result);
        }
    }
}

/// Part of a matrix, packed; rows and columns are (first, how many).
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
