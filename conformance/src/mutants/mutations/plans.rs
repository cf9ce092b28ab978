//! Lt plans.

use std::collections::HashMap;

use highwater_hal::{DevicePtr, Epilogue, ErrorKind, PlanArguments, PlanId, PlanOptions};

use super::super::hooks::Hooks;
use super::super::reference::{forgiven, renamed, wrong};
use super::super::state::Shared;

mutants! {
    in "plan.value":
    "plans-ignore-beta": "Runs plans with beta 0." => |h| {
        run(h, |arguments| arguments.beta = 0.0)
    };
    "plans-write-to-c": "Writes the result of a plan to C instead of a separate D." =>
        |h| run(h, |arguments| arguments.d = arguments.c);
    "plans-read-d": "Adds the old D instead of a separate C." => |h| run(h, |arguments| arguments.c = arguments.d);
    "first-alpha-stays": "Runs a plan with the alpha of its first run." => |h| {
        let first = Shared::<HashMap<(u64, PlanId), f64>>::default();
        h.handle.run_plan(move |handle, plan, arguments| {
            let mut arguments = *arguments;
            let key = (handle.raw(), plan);
            arguments.alpha = first.with(|first| *first.entry(key).or_insert(arguments.alpha));
            handle.run_plan(plan, &arguments)
        });
    };
    "newest-plan-runs": "Runs the newest plan instead of the named one." => |h| {
        let newest = Shared::<Option<PlanId>>::default();
        let made = newest.clone();
        h.handle.create_plan(move |handle, options| {
            let plan = handle.create_plan(options)?;
            made.set(Some(plan));
            Ok(plan)
        });
        h.handle.run_plan(move |handle, plan, arguments| {
            // It may be gone, or another handle's.
            let other = newest.get().unwrap_or(plan);
            handle.run_plan(other, arguments).or_else(|_| handle.run_plan(plan, arguments))
        });
    };
    "plans-in-tf32": "Makes plans in TF32 if the device has it." => |h| h.handle.create_plan(|handle, options| {
        let rounded = options.with_math_mode(highwater_hal::MathMode::Tf32);
        handle.create_plan(&rounded).or_else(|_| handle.create_plan(options))
    });
    "first-plan-of-a-batch": "Runs the first product of a plan for a batch." => |h| planned(h, |options| {
        if let Some(batch) = &mut options.shape.batch {
            batch.count = batch.count.min(1);
        }
    });

    "plans-with-the-first-stride": "Makes plans with the stride of B of the first plan of their sizes." => |h| {
        let first = Shared::<HashMap<(u64, usize, usize, usize), usize>>::default();
        h.handle.create_plan(move |handle, options| {
            let mut options = *options;
            let key = (handle.raw(), options.shape.m, options.shape.n, options.shape.k);
            if let Some(batch) = &mut options.shape.batch {
                batch.stride_b = first.with(|first| *first.entry(key).or_insert(batch.stride_b)).min(batch.stride_b);
            }
            handle.create_plan(&options)
        });
    };

    in "plan.epilogue":
    "bias-left-out": "Adds no bias unless an activation follows it." => |h| {
        planned(h, |options| {
            options.epilogue = if options.epilogue == Epilogue::Bias { Epilogue::None } else { options.epilogue }
        });
        h.handle.run_plan(|handle, plan, arguments| {
            let mut without = *arguments;
            without.bias = None;
            handle.run_plan(plan, arguments).or_else(|_| handle.run_plan(plan, &without))
        });
    };
    "bias-not-clamped": "Adds a bias and clamps nothing." => |h| {
        exchange(h, Epilogue::BiasRelu, Epilogue::Bias)
    };
    "clamp-left-out": "Clamps nothing without a bias." => |h| {
        exchange(h, Epilogue::Relu, Epilogue::None)
    };
    "gelu-as-clamp": "Clamps instead of applying GELU." => |h| {
        exchange(h, Epilogue::Gelu, Epilogue::Relu)
    };
    "gelu-of-a-bias-left-out": "Adds a bias and applies no GELU." => |h| {
        exchange(h, Epilogue::BiasGelu, Epilogue::Bias)
    };
    "bias-of-the-row-before": "Adds the bias of the row before." => |h| h.handle.run_plan(|handle, plan, arguments| {
        let mut off = *arguments;
        off.bias = arguments.bias.map(|bias| DevicePtr::new(bias.get() - 4));
        handle.run_plan(plan, &off).or_else(|_| handle.run_plan(plan, arguments))
    });

    in "plan.alpha-zero":
    "plans-read-factors": "Multiplies A and B by the least positive number if alpha is 0." => |h| run(h, |arguments| {
        if arguments.alpha == 0.0 {
            arguments.alpha = f64::from(f32::from_bits(1));
        }
    });
    "plans-without-k-refused": "Refuses plans with k 0." => |h| h.handle.create_plan(|handle, options| match options.shape.k {
        0 => Err(wrong(ErrorKind::InvalidArgument, "create_plan")),
        _ => handle.create_plan(options),
    });
    "epilogue-lost-with-alpha-zero": "Scales C and applies no epilogue if alpha is 0." => |h| {
        let plain = Shared::<HashMap<(u64, PlanId), PlanId>>::default();
        let made = plain.clone();
        h.handle.create_plan(move |handle, options| {
            let plan = handle.create_plan(options)?;
            let mut without = *options;
            without.epilogue = Epilogue::None;
            let other = handle.create_plan(&without)?;
            made.with(|made| made.insert((handle.raw(), plan), other));
            Ok(plan)
        });
        h.handle.run_plan(move |handle, plan, arguments| {
            let other = plain.with(|plain| plain.get(&(handle.raw(), plan)).copied());
            let mut without = *arguments;
            without.bias = None;
            match other {
                Some(other) if arguments.alpha == 0.0 => handle.run_plan(other, &without),
                _ => handle.run_plan(plan, arguments),
            }
        });
    };

    in "plan.mixed":
    "plans-ignore-the-output": "Makes plans for results of the factors' type." =>
        |h| planned(h, |options| options.shape.output = options.shape.data_type);
    "plans-between-elements": "Writes a D that lies between two elements at the next element." => |h| run(h, |arguments| {
        arguments.d = DevicePtr::new(arguments.d.get().next_multiple_of(4));
        arguments.c = DevicePtr::new(arguments.c.get().next_multiple_of(4));
    });

    in "plan.stale":
    "destroyed-plans-run": "Keeps plans that are destroyed." => |h| {
        let gone = Shared::<Vec<PlanId>>::default();
        h.handle.destroy_plan(move |handle, plan| {
            let again = gone.with(|gone| gone.contains(&plan));
            if again || plan.get() == u64::MAX {
                return handle.destroy_plan(plan);
            }
            gone.with(|gone| gone.push(plan));
            Ok(())
        });
    };
    "unknown-plans-run": "Runs plans that it does not know, as plans of nothing." =>
        |h| h.handle.run_plan(|handle, plan, arguments| {
            forgiven(ErrorKind::InvalidHandle, handle.run_plan(plan, arguments), ())
        });
    "plans-destroyed-twice": "Destroys plans as often as asked." =>
        |h| h.handle.destroy_plan(|handle, plan| forgiven(ErrorKind::InvalidHandle, handle.destroy_plan(plan), ()));

    "sixty-four-plans": "Keeps the latest 64 plans of a handle." => |h| {
        let made = Shared::<HashMap<u64, Vec<PlanId>>>::default();
        let gone = made.clone();
        h.handle.create_plan(move |handle, options| {
            let plan = handle.create_plan(options)?;
            let oldest = made.with(|made| {
                let plans = made.entry(handle.raw()).or_default();
                plans.push(plan);
                (plans.len() > 64).then(|| plans.remove(0))
            });
            oldest.map_or(Ok(()), |oldest| handle.destroy_plan(oldest))?;
            Ok(plan)
        });
        h.handle.destroy_plan(move |handle, plan| {
            gone.with(|gone| gone.entry(handle.raw()).or_default().retain(|other| *other != plan));
            handle.destroy_plan(plan)
        });
    };

    in "plan.destroy-pending":
    "runs-spoiled-with-their-plan": "Spoils the result of a run that is outstanding when its plan is destroyed." => |h| {
        let results = Shared::<HashMap<(u64, PlanId), DevicePtr>>::default();
        let noted = results.clone();
        h.handle.run_plan(move |handle, plan, arguments| {
            handle.run_plan(plan, arguments)?;
            noted.with(|noted| noted.insert((handle.raw(), plan), arguments.d));
            Ok(())
        });
        h.handle.destroy_plan(move |handle, plan| {
            let result = results.with(|results| results.remove(&(handle.raw(), plan)));
            if let (Some(result), Some(stream)) = (result, handle.stream)
                && handle.backend.is_pending(stream)
            {
                handle.backend.overwrite(handle.device(), result, 16, stream);
            }
            handle.destroy_plan(plan)
        });
    };

    in "plan.alignment":
    "any-alignment": "Accepts operands with the alignment of their elements only." =>
        |h| planned(h, |options| options.alignment = options.shape.data_type.bytes());
    "misaligned-as-unknown": "Reports misaligned operands as an unknown plan." =>
        |h| h.handle.run_plan(|handle, plan, arguments| {
            renamed(ErrorKind::InvalidArgument, ErrorKind::InvalidHandle, "run_plan", handle.run_plan(plan, arguments))
        });
}

fn run(h: &mut Hooks, change: fn(&mut PlanArguments)) {
    h.handle.run_plan(move |handle, plan, arguments| {
        let mut arguments = *arguments;
        change(&mut arguments);
        handle.run_plan(plan, &arguments)
    });
}

fn planned(h: &mut Hooks, change: fn(&mut PlanOptions)) {
    h.handle.create_plan(move |handle, options| {
        let mut options = *options;
        change(&mut options);
        handle.create_plan(&options)
    });
}

/// Makes plans with another epilogue than asked for.
fn exchange(h: &mut Hooks, asked: Epilogue, made: Epilogue) {
    h.handle.create_plan(move |handle, options| {
        let mut options = *options;
        if options.epilogue == asked {
            options.epilogue = made;
        }
        handle.create_plan(&options)
    });
}
