//! A client that knows nothing of the simulation: the safe layer of `cudarc`, made for the vendor's libraries.

use cudarc::cublas::{CudaBlas, Gemm, GemmConfig, StridedBatchedConfig, sys::cublasOperation_t};
use cudarc::cublaslt::{Activation, CudaBlasLT, Matmul, MatmulConfig};
use cudarc::driver::CudaContext;

use highwater_simulated_harness::isolated;
use highwater_simulated_harness::values::{F32, Shape};

use crate::values::{assert_close, numbers};

fn singles(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

isolated! {
    fn cudarc_multiplies_on_a_stream_of_its_own(_) over ["cuda"] {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let blas = CudaBlas::new(stream.clone()).unwrap();
        let shape = Shape { transposed: (true, false), m: 90, n: 70, k: 11, lda: 11, ldb: 11, ldc: 90 };
        let (a, b, c) = (numbers(shape.elements()[0], 1), numbers(2 * 11 * 70, 2), numbers(2 * 90 * 70, 3));
        let [device_a, device_b, mut device_c] = [&a, &b, &c].map(|values| stream.clone_htod(&singles(values)).unwrap());
        let gemm = GemmConfig {
            transa: cublasOperation_t::CUBLAS_OP_T, transb: cublasOperation_t::CUBLAS_OP_N,
            m: 90, n: 70, k: 11, alpha: 1.5, lda: 11, ldb: 11, beta: -1.0, ldc: 90,
        };
        let batch = StridedBatchedConfig { gemm, batch_size: 2, stride_a: 0, stride_b: 11 * 70, stride_c: 90 * 70 };
        // SAFETY: the matrices are as large as the configuration says.
        unsafe { blas.gemm_strided_batched(batch, &device_a, &device_b, &mut device_c) }.unwrap();
        let seen = doubles(&stream.clone_dtoh(&device_c).unwrap());
        for (index, seen) in seen.chunks_exact(90 * 70).enumerate() {
            let expected = shape.reference((1.5, -1.0), [&a, &b[index * 770..], &c[index * 6300..][..6300]]);
            assert_close(F32, seen, &expected, &format!("product {index}"));
        }
        // SAFETY: as above.
        unsafe { blas.gemm(GemmConfig { beta: 0.0, ..gemm }, &device_a, &device_b, &mut device_c) }.unwrap();
        let seen = doubles(&stream.clone_dtoh(&device_c).unwrap());
        assert_close(F32, &seen[..6300], &shape.reference((1.5, 0.0), [&a, &b, &c[..6300]]), "one product");
    }

    fn cudarc_runs_plans_with_a_bias_and_an_activation(_) over ["cuda"] {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let blas = CudaBlasLT::new(stream.clone()).unwrap();
        let shape = Shape::packed(60, 50, 7);
        let (a, b, bias) = (numbers(420, 4), numbers(350, 5), numbers(60, 6));
        let [device_a, device_b, device_bias] = [&a, &b, &bias].map(|values| stream.clone_htod(&singles(values)).unwrap());
        let mut device_c = stream.alloc_zeros::<f32>(3000).unwrap();
        let config = MatmulConfig {
            transa: false, transb: false, transc: false, m: 60, n: 50, k: 7, alpha: 1.0, lda: 60, ldb: 7, beta: 0.0,
            ldc: 60, stride_a: None, stride_b: None, stride_c: None, stride_bias: None, batch_size: None,
        };
        // SAFETY: the matrices are as large as the configuration says.
        unsafe { blas.matmul(config, &device_a, &device_b, &mut device_c, Some(&device_bias), Some(&Activation::Relu)) }
            .unwrap();
        let mut expected = shape.reference((1.0, 0.0), [&a, &b, &[0.0; 3000]]);
        expected.iter_mut().enumerate().for_each(|(index, value)| *value = (*value + bias[index % 60]).max(0.0));
        assert_close(F32, &doubles(&stream.clone_dtoh(&device_c).unwrap()), &expected, "a plan");
    }
}
