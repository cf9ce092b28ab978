//! A plan of cuBLASLt: the descriptions of a product, and its run.

use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::need;
use highwater_simulated_harness::values::{F32, F64, IN_64F, Shape};

use crate::calls::{Handle, Heuristic, bits, lt};

/// A product with its descriptions.
pub(crate) struct Plan {
    pub(crate) handle: Handle,
    pub(crate) description: Handle,
    /// A, B and C.
    pub(crate) layouts: [Handle; 3],
    pub(crate) preference: Handle,
}

impl Plan {
    pub(crate) fn new(input: u32, output: u32, compute: u32, shape: &Shape) -> Answer<Self> {
        let mut plan = Self { handle: 0, description: 0, layouts: [0; 3], preference: 0 };
        let scales = if compute == IN_64F { F64 } else { F32 };
        need("cublasLtCreate", lt!(cublasLtCreate(&mut plan.handle)))?;
        need("cublasLtMatmulDescCreate", lt!(cublasLtMatmulDescCreate(&mut plan.description, compute, scales)))?;
        need("cublasLtMatmulPreferenceCreate", lt!(cublasLtMatmulPreferenceCreate(&mut plan.preference)))?;
        let Shape { transposed, m, n, k, lda, ldb, ldc } = *shape;
        let (a, b) = (if transposed.0 { (k, m) } else { (m, k) }, if transposed.1 { (n, k) } else { (k, n) });
        for (layout, (of, (rows, columns), ld)) in
            plan.layouts.iter_mut().zip([(input, a, lda), (input, b, ldb), (output, (m, n), ldc)])
        {
            let code = lt!(cublasLtMatrixLayoutCreate(layout, of, rows as u64, columns as u64, ld as i64));
            need("cublasLtMatrixLayoutCreate", code)?;
        }
        plan.describe(3, &u32::from(transposed.0))?;
        plan.describe(4, &u32::from(transposed.1))?;
        Ok(plan)
    }

    pub(crate) fn describe<T>(&self, attribute: u32, value: &T) -> Answer {
        let code = lt!(cublasLtMatmulDescSetAttribute(self.description, attribute, bits(value), size_of::<T>()));
        need("cublasLtMatmulDescSetAttribute", code)
    }

    pub(crate) fn limit_workspace(&self, bytes: u64) -> Answer {
        let code = lt!(cublasLtMatmulPreferenceSetAttribute(self.preference, 1, bits(&bytes), 8));
        need("cublasLtMatmulPreferenceSetAttribute", code)
    }

    pub(crate) fn find(&self) -> (u32, i32, Heuristic) {
        let [a, b, c] = self.layouts;
        let (mut result, mut found) = (Heuristic::default(), 0);
        let code = lt!(cublasLtMatmulAlgoGetHeuristic(
            self.handle,
            self.description,
            a,
            b,
            c,
            c,
            self.preference,
            1,
            &mut result,
            &mut found
        ));
        (code, found, result)
    }

    pub(crate) fn run(
        &self,
        found: &Heuristic,
        (alpha, beta): (&[u8], &[u8]),
        [a, b, c]: [u64; 3],
        (workspace, room): (u64, usize),
        stream: Handle,
    ) -> u32 {
        let [of_a, of_b, of_c] = self.layouts;
        lt!(cublasLtMatmul(
            self.handle,
            self.description,
            alpha.as_ptr().cast(),
            a,
            of_a,
            b,
            of_b,
            beta.as_ptr().cast(),
            c,
            of_c,
            c,
            of_c,
            &found.algorithm,
            workspace,
            room,
            stream
        ))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // A description that was not made is null. Nothing can be done about one that cannot be destroyed.
        for layout in self.layouts.into_iter().filter(|&layout| layout != 0) {
            lt!(cublasLtMatrixLayoutDestroy(layout));
        }
        if self.preference != 0 {
            lt!(cublasLtMatmulPreferenceDestroy(self.preference));
        }
        if self.description != 0 {
            lt!(cublasLtMatmulDescDestroy(self.description));
        }
        if self.handle != 0 {
            lt!(cublasLtDestroy(self.handle));
        }
    }
}
