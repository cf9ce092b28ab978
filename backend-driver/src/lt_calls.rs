//! The calls of an Lt library, and its numbers.

use super::codes::Codes;
use super::raw::RawStream;
use crate::{raw_handles, vendor_calls};
use highwater_hal::DevicePtr;

raw_handles! {
    /// A handle: `cublasLtHandle_t` or `hipblasLtHandle_t`.
    pub RawLt;
    /// The description of a product: `cublasLtMatmulDesc_t` or `hipblasLtMatmulDesc_t`.
    pub RawMatmulDesc;
    /// The layout of a matrix: `cublasLtMatrixLayout_t` or `hipblasLtMatrixLayout_t`.
    pub RawMatrixLayout;
    /// A preference of the heuristic: `cublasLtMatmulPreference_t` or `hipblasLtMatmulPreference_t`.
    pub RawMatmulPreference;
}

vendor_calls! {
    /// The calls of an Lt library.
    pub struct LtCalls {
        required {
            /// Creates a handle.
            create: "Create" (*mut RawLt);
            /// Destroys a handle.
            destroy: "Destroy" (RawLt);
            /// Creates a description of a product: out, compute type, type of alpha and beta.
            matmul_desc_create: "MatmulDescCreate" (*mut RawMatmulDesc, i32, i32);
            /// Destroys a description.
            matmul_desc_destroy: "MatmulDescDestroy" (RawMatmulDesc);
            /// Sets an attribute of a description: description, attribute, value, its bytes.
            matmul_desc_set_attribute: "MatmulDescSetAttribute" (RawMatmulDesc, u32, *const u8, usize);
            /// Creates a layout: out, type, rows, columns, leading dimension.
            matrix_layout_create: "MatrixLayoutCreate" (*mut RawMatrixLayout, i32, u64, u64, i64);
            /// Destroys a layout.
            matrix_layout_destroy: "MatrixLayoutDestroy" (RawMatrixLayout);
            /// Sets an attribute of a layout: layout, attribute, value, its bytes.
            matrix_layout_set_attribute: "MatrixLayoutSetAttribute" (RawMatrixLayout, u32, *const u8, usize);
            /// Creates a matmul preference.
            matmul_preference_create: "MatmulPreferenceCreate" (*mut RawMatmulPreference);
            /// Destroys a matmul preference.
            matmul_preference_destroy: "MatmulPreferenceDestroy" (RawMatmulPreference);
            /// Sets an attribute of a preference: preference, attribute, value, its bytes.
            matmul_preference_set_attribute: "MatmulPreferenceSetAttribute" (RawMatmulPreference, u32, *const u8, usize);
            /// Returns algorithms: handle, description, layouts of A, B, C and D, preference, limit, out results, out number.
            matmul_algo_get_heuristic: "MatmulAlgoGetHeuristic" (
                RawLt,
                RawMatmulDesc,
                RawMatrixLayout,
                RawMatrixLayout,
                RawMatrixLayout,
                RawMatrixLayout,
                RawMatmulPreference,
                i32,
                *mut u8,
                *mut i32,
            );
            /// Multiplies: handle, description, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm,
            /// workspace, its bytes, stream.
            matmul: "Matmul" (
                RawLt,
                RawMatmulDesc,
                *const u8,
                DevicePtr,
                RawMatrixLayout,
                DevicePtr,
                RawMatrixLayout,
                *const u8,
                DevicePtr,
                RawMatrixLayout,
                DevicePtr,
                RawMatrixLayout,
                *const u8,
                DevicePtr,
                usize,
                RawStream,
            );
        }
        optional {}
    }
}

/// An opened Lt library.
#[derive(Debug)]
pub struct Lt {
    /// Its calls.
    pub calls: LtCalls,
    /// Its numbers.
    pub codes: &'static LtCodes,
}

/// The differences between the vendors' Lt libraries.
#[derive(Debug)]
pub struct LtCodes {
    /// The meaning of the status codes.
    pub codes: &'static Codes,
    /// The library's name in messages.
    pub name: &'static str,
    /// Attributes of a product.
    pub product: ProductAttributes,
    /// The layout's attribute for the number of matrices in a batch.
    pub batch_count: u32,
    /// The layout's attribute for the distance of matrices in a batch.
    pub batch_stride: u32,
    /// The preference's attribute for the bytes of workspace.
    pub max_workspace: u32,
    /// The preference's attributes for the alignments of A, B, C and D; `None` if the library has none.
    pub alignments: Option<[u32; 4]>,
    /// The reduction schemes, by which partial sums are added; `None` if the library offers no choice.
    pub reductions: Option<Reductions>,
    /// The epilogues.
    pub epilogues: Epilogues,
    /// The bytes of an algorithm, at most 64.
    pub algorithm_bytes: usize,
    /// The bytes of device memory that must be free before a handle is created; 0 if the library reports that memory is
    /// missing. Some libraries end the process instead.
    pub needs_free_bytes: usize,
}

/// Attributes of a product.
#[derive(Debug, Clone, Copy)]
pub struct ProductAttributes {
    /// The operation on A.
    pub transpose_a: u32,
    /// The operation on B.
    pub transpose_b: u32,
    /// The epilogue.
    pub epilogue: u32,
    /// The address of the bias.
    pub bias: u32,
    /// The type of the bias.
    pub bias_type: u32,
}

/// The preference's attribute for the reduction schemes, and its values.
#[derive(Debug, Clone, Copy)]
pub struct Reductions {
    /// The attribute.
    pub attribute: u32,
    /// Partial sums are added in the workspace, in the compute type and in a fixed order.
    pub in_order: u32,
    /// Partial sums are added in place, in the order in which the kernels finish.
    pub in_place: u32,
}

/// Numbers of the epilogues.
#[derive(Debug, Clone, Copy)]
pub struct Epilogues {
    /// None.
    pub none: u32,
    /// A bias.
    pub bias: u32,
    /// ReLU.
    pub relu: u32,
    /// A bias, then ReLU.
    pub bias_relu: u32,
    /// GELU.
    pub gelu: u32,
    /// A bias, then GELU.
    pub bias_gelu: u32,
}
