//! Matrix products.

use highwater_hal::{DataType, ErrorKind, Gemm, Transpose};

use super::super::Saboteur;
use super::super::honest::{is, wrong};
use super::super::hooks::Hooks;

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new("alpha-ignored", "gemm.value", "Multiplies with alpha 1.", |h| {
        altered(h, |gemm| gemm.alpha = if gemm.alpha == 0.0 { 0.0 } else { 1.0 });
    }),
    Saboteur::new("alpha-in-single-precision", "gemm.value", "Rounds alpha of 64-bit products to 32 bits.", |h| {
        altered(h, |gemm| gemm.alpha = f64::from(gemm.alpha as f32));
    }),
    Saboteur::new("sums-cut", "gemm.value", "Adds up 4096 terms of a sum, and no more.", |h| {
        altered(h, |gemm| gemm.shape.k = gemm.shape.k.min(4096));
    }),
    Saboteur::new("tiles-only", "gemm.value", "Leaves out the rows after the last whole tile of 16.", |h| {
        altered(h, |gemm| {
            if gemm.shape.m > 16 {
                gemm.shape.m -= gemm.shape.m % 16;
            }
        });
    }),
    Saboteur::new("one-block-of-columns", "gemm.value", "Multiplies the first 64 columns, and no more.", |h| {
        altered(h, |gemm| gemm.shape.n = gemm.shape.n.min(64));
    }),
    Saboteur::new("tf32-stays", "gemm.value", "Keeps to TF32 once it was chosen.", |h| {
        h.handle.set_math_mode(|handle, mode| match mode {
            highwater_hal::MathMode::Tf32 => handle.set_math_mode(mode),
            _ => Ok(()),
        });
    }),
    Saboteur::new("nan-as-zero", "gemm.value", "Stores 0 in results of 32 bits that are no number.", |h| {
        edited(h, |element| if f32::from_le_bytes(element).is_nan() { [0; 4] } else { element });
    }),
    Saboteur::new(
        "infinity-as-the-largest",
        "gemm.value",
        "Stores the largest number in results of 32 bits that are infinite.",
        |h| {
            edited(h, |element| {
                let value = f32::from_le_bytes(element);
                if value.is_infinite() { f32::MAX.copysign(value).to_le_bytes() } else { element }
            });
        },
    ),
    Saboteur::new("square-a-as-it-is", "gemm.transpose", "Does not transpose A where it is square.", |h| {
        altered(h, |gemm| {
            if gemm.shape.m == gemm.shape.k {
                gemm.shape.transpose_a = Transpose::No;
            }
        });
    }),
    Saboteur::new(
        "square-b-as-it-is",
        "gemm.transpose",
        "Does not transpose B where it is square and A is transposed too.",
        |h| {
            altered(h, |gemm| {
                if gemm.shape.n == gemm.shape.k && gemm.shape.transpose_a == Transpose::Yes {
                    gemm.shape.transpose_b = Transpose::No;
                }
            });
        },
    ),
    Saboteur::new(
        "gaps-overwritten",
        "gemm.leading-dimension",
        "Writes to the gap below the first column of C.",
        |h| {
            h.handle.gemm(|handle, gemm| {
                handle.gemm(gemm)?;
                if let (Some(stream), false) = (handle.stream, gemm.shape.is_empty()) {
                    let (m, bytes) = (gemm.shape.m, gemm.shape.output.bytes());
                    let gap = (gemm.shape.ldc - m) * bytes;
                    if gap > 0 && gemm.shape.n > 1 {
                        handle.backend.smear(handle.device(), gemm.c.offset(m * bytes), gap, stream);
                    }
                }
                Ok(())
            });
        },
    ),
    Saboteur::new("c-packed", "gemm.leading-dimension", "Writes C without gaps.", |h| {
        altered(h, |gemm| {
            if gemm.shape.batch.is_none() {
                gemm.shape.ldc = gemm.shape.m.max(1);
            }
        });
    }),
    Saboteur::new("b-packed", "gemm.leading-dimension", "Reads B as if it had no gaps.", |h| {
        altered(h, |gemm| gemm.shape.ldb = gemm.shape.rows_b().max(1));
    }),
    Saboteur::new("beta-ignored", "gemm.beta", "Multiplies with beta 0.", |h| altered(h, |gemm| gemm.beta = 0.0)),
    Saboteur::new("beta-twice", "gemm.beta", "Applies beta twice.", |h| altered(h, |gemm| gemm.beta *= gemm.beta)),
    Saboteur::new("beta-by-its-sign", "gemm.beta", "Adds the old C, or takes it off, and does not scale it.", |h| {
        altered(h, |gemm| gemm.beta = if gemm.beta == 0.0 { 0.0 } else { gemm.beta.signum() });
    }),
    Saboteur::new(
        "old-c-read",
        "gemm.beta-zero",
        "Reads the old C with beta 0, and multiplies it with next to nothing.",
        |h| {
            altered(h, |gemm| {
                if gemm.beta == 0.0 {
                    gemm.beta = f64::MIN_POSITIVE;
                }
            });
        },
    ),
    Saboteur::new(
        "factors-read",
        "gemm.alpha-zero",
        "Reads A and B with alpha 0, and multiplies them with next to nothing.",
        |h| {
            altered(h, |gemm| {
                if gemm.alpha == 0.0 {
                    gemm.alpha = f64::MIN_POSITIVE;
                }
            });
        },
    ),
    Saboteur::new("nothing-without-k", "gemm.alpha-zero", "Leaves C as it is where k is 0.", |h| {
        h.handle.gemm(|handle, gemm| if gemm.shape.k == 0 { Ok(()) } else { handle.gemm(gemm) });
    }),
    Saboteur::new("empty-products-refused", "gemm.empty", "Refuses products with m or n 0.", |h| {
        h.handle.gemm(|handle, gemm| match gemm.shape.m.min(gemm.shape.n) {
            0 => Err(wrong(ErrorKind::InvalidArgument, "gemm")),
            _ => handle.gemm(gemm),
        });
    }),
    Saboteur::new("empty-products-write", "gemm.empty", "Writes an element of C where m is 0.", |h| {
        h.handle.gemm(|handle, gemm| {
            if let (0, Some(stream)) = (gemm.shape.m, handle.stream) {
                handle.backend.smear(handle.device(), gemm.c, gemm.shape.output.bytes(), stream);
            }
            handle.gemm(gemm)
        });
    }),
    Saboteur::new("empty-batches-of-one", "gemm.empty", "Takes a batch of no product for one of one.", |h| {
        altered(h, |gemm| {
            if let Some(batch) = &mut gemm.shape.batch {
                batch.count = batch.count.max(1);
            }
        });
    }),
    Saboteur::new("first-of-a-batch", "gemm.strided-batch", "Multiplies the first of a batch.", |h| {
        altered(h, |gemm| {
            if let Some(batch) = &mut gemm.shape.batch {
                batch.count = batch.count.min(1);
            }
        });
    }),
    Saboteur::new(
        "batches-packed",
        "gemm.strided-batch",
        "Reads the As of a batch as if they followed one another.",
        |h| {
            altered(h, |gemm| {
                let one = gemm.shape.lda * gemm.shape.columns_a().saturating_sub(1) + gemm.shape.rows_a();
                if let Some(batch) = &mut gemm.shape.batch {
                    batch.stride_a = batch.stride_a.min(one);
                }
            });
        },
    ),
    Saboteur::new(
        "shared-factors-alone",
        "gemm.strided-batch",
        "Multiplies the first of a batch whose products share B.",
        |h| {
            altered(h, |gemm| {
                if let Some(batch) = &mut gemm.shape.batch
                    && batch.stride_b == 0
                {
                    batch.count = batch.count.min(1);
                }
            });
        },
    ),
    Saboteur::new("output-ignored", "gemm.mixed", "Writes results of the factors' type whatever is asked for.", |h| {
        altered(h, |gemm| gemm.shape.output = gemm.shape.data_type);
    }),
    Saboteur::new(
        "other-pairs-taken",
        "gemm.mixed-pairs",
        "Takes products of pairs of types that nobody has, and does nothing.",
        |h| {
            h.handle.gemm(|handle, gemm| {
                let done = handle.gemm(gemm);
                if gemm.shape.is_mixed() && is(&done, ErrorKind::Unsupported) { Ok(()) } else { done }
            });
        },
    ),
    Saboteur::new(
        "other-pairs-written",
        "gemm.mixed-pairs",
        "Refuses products of pairs of types that nobody has, and writes to C.",
        |h| {
            h.handle.gemm(|handle, gemm| {
                let done = handle.gemm(gemm);
                if let (true, Some(stream)) =
                    (gemm.shape.is_mixed() && is(&done, ErrorKind::Unsupported), handle.stream)
                {
                    handle.backend.smear(handle.device(), gemm.c, gemm.shape.output.bytes(), stream);
                }
                done
            });
        },
    ),
    Saboteur::new("products-wait", "gemm.asynchronous", "Returns from a product when it is done.", |h| {
        h.handle.gemm(|handle, gemm| {
            handle.gemm(gemm)?;
            handle.wait()
        });
    }),
    Saboteur::new("products-wait-before", "gemm.asynchronous", "Waits for the stream before a product.", |h| {
        h.handle.gemm(|handle, gemm| {
            handle.wait()?;
            handle.gemm(gemm)
        });
    }),
];

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
        let Some(stream) = handle.stream.filter(|&stream| !handle.backend.records(stream)) else { return Ok(()) };
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
