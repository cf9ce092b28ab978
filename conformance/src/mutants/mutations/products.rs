//! Matrix products.

use std::collections::HashMap;

use highwater_hal::{DataType, ErrorKind, FillPattern, Gemm, MemoryFill, Transpose};

use super::super::hooks::Hooks;
use super::super::reference::{is, wrong};
use super::super::state::Shared;

mutants! {
    in "gemm.value":
    "alpha-ignored": "Multiplies with alpha 1." =>
        |h| altered(h, |gemm| gemm.alpha = if gemm.alpha == 0.0 { 0.0 } else { 1.0 });
    "alpha-in-single-precision": "Rounds alpha of 64-bit products to 32 bits." =>
        |h| altered(h, |gemm| gemm.alpha = f64::from(gemm.alpha as f32));
    "alpha-in-half-precision": "Limits alpha of products of half precision to the largest number of their type." =>
        |h| altered(h, |gemm| {
            if gemm.shape.data_type == DataType::F16 {
                gemm.alpha = gemm.alpha.clamp(-65_504.0, 65_504.0);
            }
        });
    "sums-cut": "Adds up 4096 terms of a sum, and no more." => |h| altered(h, |gemm| gemm.shape.k = gemm.shape.k.min(4096));
    "sums-of-whole-steps": "Leaves out the last terms of a sum of more than 256 that do not fill a step of 8." =>
        |h| altered(h, |gemm| {
            if gemm.shape.k > 256 {
                gemm.shape.k -= gemm.shape.k % 8;
            }
        });
    "tiles-only": "Leaves out the rows after the last whole tile of 16." => |h| altered(h, |gemm| {
        if gemm.shape.m > 16 {
            gemm.shape.m -= gemm.shape.m % 16;
        }
    });
    "one-block-of-columns": "Multiplies the first 64 columns, and no more." =>
        |h| altered(h, |gemm| gemm.shape.n = gemm.shape.n.min(64));
    "tf32-stays" needs [has::tf32]: "Keeps to TF32 once it was chosen." => |h| h.handle.set_math_mode(|handle, mode| match mode {
        highwater_hal::MathMode::Tf32 => handle.set_math_mode(mode),
        _ => Ok(()),
    });
    "nan-as-zero": "Stores 0 in results of 32 bits that are no number." => |h| {
        edited(h, |element| if f32::from_le_bytes(element).is_nan() { [0; 4] } else { element });
    };
    "infinity-as-the-largest": "Stores the largest number in results of 32 bits that are infinite." =>
        |h| edited(h, |element| {
            let value = f32::from_le_bytes(element);
            if value.is_infinite() { f32::MAX.copysign(value).to_le_bytes() } else { element }
        });

    in "gemm.infinite-factors":
    "infinite-alpha-as-the-largest": "Multiplies with the largest number instead of an infinite alpha." => |h| altered(h, |gemm| {
        if gemm.alpha.is_infinite() {
            gemm.alpha = f64::from(f32::MAX).copysign(gemm.alpha);
        }
    });
    "beta-that-is-no-number-as-zero": "Ignores a beta that is no number." =>
        |h| altered(h, |gemm| if gemm.beta.is_nan() { gemm.beta = 0.0 });

    in "gemm.transpose":
    "square-a-as-it-is": "Does not transpose a square A." => |h| altered(h, |gemm| {
        if gemm.shape.m == gemm.shape.k {
            gemm.shape.transpose_a = Transpose::No;
        }
    });
    "square-b-as-it-is": "Does not transpose a square B if A is transposed too." => |h| altered(h, |gemm| {
        if gemm.shape.n == gemm.shape.k && gemm.shape.transpose_a == Transpose::Yes {
            gemm.shape.transpose_b = Transpose::No;
        }
    });

    "square-b-of-a-batch-as-it-is" needs [has::gemm_bf16]: "Does not transpose a square B of a batch of bfloat16." => |h| altered(h, |gemm| {
        if gemm.shape.batch.is_some() && gemm.shape.data_type == DataType::Bf16 && gemm.shape.n == gemm.shape.k {
            gemm.shape.transpose_b = Transpose::No;
        }
    });

    in "gemm.leading-dimension":
    "gaps-overwritten": "Writes to the gap below the first column of C." => |h| h.handle.gemm(|handle, gemm| {
        handle.gemm(gemm)?;
        if let (Some(stream), false) = (handle.stream, gemm.shape.is_empty()) {
            let (m, bytes) = (gemm.shape.m, gemm.shape.output.bytes());
            let gap = (gemm.shape.ldc - m) * bytes;
            if gap > 0 && gemm.shape.n > 1 {
                handle.backend.overwrite(handle.device(), gemm.c.offset(m * bytes), gap, stream);
            }
        }
        Ok(())
    });
    "gaps-cleared-without-terms": "Clears C from its first element to its last if nothing enters it." => |h| h.handle.gemm(|handle, gemm| {
        handle.gemm(gemm)?;
        let clears = gemm.shape.k == 0 && gemm.beta == 0.0 && !gemm.shape.is_empty();
        if let (Some(stream), true) = (handle.stream, clears) {
            let bytes = gemm.shape.extents("gemm")?.c * gemm.shape.output.bytes();
            let fill = MemoryFill::new(handle.device(), gemm.c, FillPattern::U8(0), bytes);
            handle.backend.fill(&fill, stream)?;
        }
        Ok(())
    });
    "c-packed": "Writes C without gaps." => |h| altered(h, |gemm| {
        if gemm.shape.batch.is_none() {
            gemm.shape.ldc = gemm.shape.m.max(1);
        }
    });
    "b-packed": "Reads B as if it had no gaps." => |h| altered(h, |gemm| gemm.shape.ldb = gemm.shape.rows_b().max(1));

    "single-columns-packed": "Treats the elements of a transposed B with one column as packed." =>
        |h| altered(h, |gemm| {
            if gemm.shape.n == 1 && gemm.shape.transpose_b == Transpose::Yes {
                gemm.shape.ldb = 1;
            }
        });

    in "gemm.beta":
    "beta-ignored": "Multiplies with beta 0." => |h| altered(h, |gemm| gemm.beta = 0.0);
    "beta-twice": "Applies beta twice." => |h| altered(h, |gemm| gemm.beta *= gemm.beta);
    "beta-by-its-sign": "Adds the old C, or takes it off, and does not scale it." =>
        |h| altered(h, |gemm| gemm.beta = if gemm.beta == 0.0 { 0.0 } else { gemm.beta.signum() });

    in "gemm.beta-zero":
    "old-c-read": "Reads the old C with beta 0, and multiplies it with next to nothing." => |h| altered(h, |gemm| {
        if gemm.beta == 0.0 {
            gemm.beta = f64::MIN_POSITIVE;
        }
    });

    "old-c-read-with-minus-zero": "Reads the old C with beta -0." => |h| altered(h, |gemm| {
        if gemm.beta == 0.0 && gemm.beta.is_sign_negative() {
            gemm.beta = f64::MIN_POSITIVE;
        }
    });

    in "gemm.alpha-zero":
    "factors-read-with-minus-zero": "Reads A and B with alpha -0." => |h| altered(h, |gemm| {
        if gemm.alpha == 0.0 && gemm.alpha.is_sign_negative() {
            gemm.alpha = f64::MIN_POSITIVE;
        }
    });
    "factors-read": "Reads A and B with alpha 0, and multiplies them with next to nothing." => |h| altered(h, |gemm| {
        if gemm.alpha == 0.0 {
            gemm.alpha = f64::MIN_POSITIVE;
        }
    });
    "nothing-without-k": "Leaves C unchanged if k is 0." =>
        |h| h.handle.gemm(|handle, gemm| if gemm.shape.k == 0 { Ok(()) } else { handle.gemm(gemm) });

    "alpha-without-terms": "Multiplies C by a NaN if alpha is NaN and there are no terms." =>
        |h| altered(h, |gemm| {
            if gemm.shape.k == 0 && gemm.alpha.is_nan() {
                gemm.beta = f64::NAN;
            }
        });

    in "gemm.empty":
    "empty-products-refused": "Refuses products with m or n 0." =>
        |h| h.handle.gemm(|handle, gemm| match gemm.shape.m.min(gemm.shape.n) {
            0 => Err(wrong(ErrorKind::InvalidArgument, "gemm")),
            _ => handle.gemm(gemm),
        });
    "empty-products-write": "Writes an element of C if m is 0." => |h| h.handle.gemm(|handle, gemm| {
        if let (0, Some(stream)) = (gemm.shape.m, handle.stream) {
            handle.backend.overwrite(handle.device(), gemm.c, gemm.shape.output.bytes(), stream);
        }
        handle.gemm(gemm)
    });
    "empty-batches-of-one": "Treats an empty batch as a batch of one product." => |h| altered(h, |gemm| {
        if let Some(batch) = &mut gemm.shape.batch {
            batch.count = batch.count.max(1);
        }
    });

    in "gemm.strided-batch":
    "first-of-a-batch": "Multiplies the first of a batch." => |h| altered(h, |gemm| {
        if let Some(batch) = &mut gemm.shape.batch {
            batch.count = batch.count.min(1);
        }
    });
    "batches-packed": "Reads the As of a batch as if they followed one another." => |h| altered(h, |gemm| {
        let one = gemm.shape.lda * gemm.shape.columns_a().saturating_sub(1) + gemm.shape.rows_a();
        if let Some(batch) = &mut gemm.shape.batch {
            batch.stride_a = batch.stride_a.min(one);
        }
    });
    "strides-of-24-bits": "Keeps the low 24 bits of the stride from one B to the next." => |h| altered(h, |gemm| {
        if let Some(batch) = &mut gemm.shape.batch {
            batch.stride_b &= (1 << 24) - 1;
        }
    });
    "shared-factors-alone": "Multiplies the first of a batch whose products share B." => |h| altered(h, |gemm| {
        if let Some(batch) = &mut gemm.shape.batch
            && batch.stride_b == 0
        {
            batch.count = batch.count.min(1);
        }
    });

    "batches-of-one-refused": "Refuses a batch of one whose stride of C is less than C." => |h| h.handle.gemm(|handle, gemm| {
        match gemm.shape.batch {
            Some(batch) if batch.count == 1 && batch.stride_c < gemm.shape.m => {
                Err(wrong(ErrorKind::InvalidArgument, "gemm"))
            }
            _ => handle.gemm(gemm),
        }
    });

    in "gemm.mixed":
    "output-ignored" needs [has::gemm_mixed]: "Writes results of the factors' type in every case." =>
        |h| altered(h, |gemm| gemm.shape.output = gemm.shape.data_type);

    in "gemm.mixed-pairs":
    "other-pairs-taken": "Accepts unsupported pairs of types, and does nothing." =>
        |h| h.handle.gemm(|handle, gemm| {
            let done = handle.gemm(gemm);
            if gemm.shape.is_mixed() && is(&done, ErrorKind::Unsupported) { Ok(()) } else { done }
        });
    "other-pairs-written": "Refuses unsupported pairs of types, and writes to C." =>
        |h| h.handle.gemm(|handle, gemm| {
            let done = handle.gemm(gemm);
            if let (true, Some(stream)) =
                (gemm.shape.is_mixed() && is(&done, ErrorKind::Unsupported), handle.stream)
            {
                handle.backend.overwrite(handle.device(), gemm.c, gemm.shape.output.bytes(), stream);
            }
            done
        });

    in "gemm.asynchronous":
    "products-wait": "Returns from a product when it is done." => |h| h.handle.gemm(|handle, gemm| {
        handle.gemm(gemm)?;
        handle.wait()
    });
    "products-of-64-bits-wait": "Returns from a product of 64 bits when it is done." => |h| h.handle.gemm(|handle, gemm| {
        handle.gemm(gemm)?;
        if gemm.shape.data_type == DataType::F64 { handle.wait() } else { Ok(()) }
    });
    "products-that-grow-wait": "Waits for the stream before a product of 64 bits whose C is larger than those of its handle before." => |h| {
        let largest = Shared::<HashMap<u64, usize>>::default();
        let made = largest.clone();
        h.backend.create_blas_handle(move |reference, device, options| {
            let handle = reference.create_blas_handle(device, options)?;
            made.with(|largest| largest.remove(&handle.raw()));
            Ok(handle)
        });
        h.handle.gemm(move |handle, gemm| {
            let elements = gemm.shape.extents("gemm")?.c;
            if gemm.shape.data_type == DataType::F64 {
                let before = largest.with(|largest| {
                    let known = largest.entry(handle.raw()).or_default();
                    std::mem::replace(known, elements.max(*known))
                });
                if before > 0 && elements > before {
                    handle.wait()?;
                }
            }
            handle.gemm(gemm)
        });
    };
    "products-wait-before": "Waits for the stream before a product." => |h| h.handle.gemm(|handle, gemm| {
        handle.wait()?;
        handle.gemm(gemm)
    });
}

fn altered(h: &mut Hooks, change: fn(&mut Gemm)) {
    h.handle.gemm(move |handle, gemm| {
        let mut gemm = *gemm;
        change(&mut gemm);
        handle.gemm(&gemm)
    });
}

/// Changes elements of results of 32 bits that are small and not captured.
fn edited(h: &mut Hooks, change: fn([u8; 4]) -> [u8; 4]) {
    h.handle.gemm(move |handle, gemm| {
        handle.gemm(gemm)?;
        let Some(stream) = handle.stream.filter(|&stream| !handle.backend.is_recording(stream)) else { return Ok(()) };
        let elements = gemm.shape.ldc * gemm.shape.n.saturating_sub(1) + gemm.shape.m;
        if gemm.shape.output != DataType::F32 || gemm.shape.batch.is_some() || !(1..4096).contains(&elements) {
            return Ok(());
        }
        handle.backend.wait_for(stream)?;
        let (m, ldc) = (gemm.shape.m, gemm.shape.ldc);
        handle.backend.edit(handle.device(), gemm.c, elements * 4, |bytes| {
            // The gaps between the columns stay as they are.
            let columns = bytes.as_chunks_mut::<4>().0.chunks_mut(ldc);
            let elements = columns.flat_map(|column| column.iter_mut().take(m));
            elements.for_each(|element| *element = change(*element));
        })
    });
}
