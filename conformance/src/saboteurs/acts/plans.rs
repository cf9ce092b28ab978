//! Lt plans.

use std::collections::HashMap;

use highwater_hal::{DevicePtr, Epilogue, ErrorKind, PlanArguments, PlanId, PlanOptions};

use super::super::Saboteur;
use super::super::honest::{is, wrong};
use super::super::hooks::Hooks;
use super::super::note::Note;

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new("plans-ignore-beta", "plan.value", "Runs plans with beta 0.", |h| {
        run(h, |arguments| arguments.beta = 0.0)
    }),
    Saboteur::new(
        "plans-write-to-c",
        "plan.value",
        "Writes the result of a plan to C where D is another matrix.",
        |h| {
            run(h, |arguments| arguments.d = arguments.c);
        },
    ),
    Saboteur::new("plans-read-d", "plan.value", "Adds the old D where C is another matrix.", |h| {
        run(h, |arguments| arguments.c = arguments.d);
    }),
    Saboteur::new("first-alpha-stays", "plan.value", "Runs a plan with the alpha of its first run.", |h| {
        let first = Note::<HashMap<(u64, PlanId), f64>>::default();
        h.handle.run_plan(move |handle, plan, arguments| {
            let mut arguments = *arguments;
            let key = (handle.raw(), plan);
            arguments.alpha = first.with(|first| *first.entry(key).or_insert(arguments.alpha));
            handle.run_plan(plan, &arguments)
        });
    }),
    Saboteur::new("newest-plan-runs", "plan.value", "Runs the plan that was made last, whichever is named.", |h| {
        let newest = Note::<Option<PlanId>>::default();
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
    }),
    Saboteur::new("plans-in-tf32", "plan.value", "Makes plans in TF32 where the device has it.", |h| {
        h.handle.create_plan(|handle, options| {
            let rounded = options.with_math_mode(highwater_hal::MathMode::Tf32);
            handle.create_plan(&rounded).or_else(|_| handle.create_plan(options))
        });
    }),
    Saboteur::new("first-plan-of-a-batch", "plan.value", "Runs the first product of a plan for a batch.", |h| {
        planned(h, |options| {
            if let Some(batch) = &mut options.shape.batch {
                batch.count = batch.count.min(1);
            }
        });
    }),
    Saboteur::new("bias-left-out", "plan.epilogue", "Adds no bias where nothing follows it.", |h| {
        planned(h, |options| {
            options.epilogue = if options.epilogue == Epilogue::Bias { Epilogue::None } else { options.epilogue }
        });
        h.handle.run_plan(|handle, plan, arguments| {
            let mut without = *arguments;
            without.bias = None;
            handle.run_plan(plan, arguments).or_else(|_| handle.run_plan(plan, &without))
        });
    }),
    Saboteur::new("bias-not-clamped", "plan.epilogue", "Adds a bias and clamps nothing.", |h| {
        exchange(h, Epilogue::BiasRelu, Epilogue::Bias)
    }),
    Saboteur::new("clamp-left-out", "plan.epilogue", "Clamps nothing where there is no bias.", |h| {
        exchange(h, Epilogue::Relu, Epilogue::None)
    }),
    Saboteur::new("gelu-as-clamp", "plan.epilogue", "Clamps where GELU is asked for.", |h| {
        exchange(h, Epilogue::Gelu, Epilogue::Relu)
    }),
    Saboteur::new("gelu-of-a-bias-left-out", "plan.epilogue", "Adds a bias and applies no GELU.", |h| {
        exchange(h, Epilogue::BiasGelu, Epilogue::Bias)
    }),
    Saboteur::new("bias-of-the-row-before", "plan.epilogue", "Adds the bias of the row before.", |h| {
        h.handle.run_plan(|handle, plan, arguments| {
            let mut off = *arguments;
            off.bias = arguments.bias.map(|bias| DevicePtr::new(bias.get() - 4));
            handle.run_plan(plan, &off).or_else(|_| handle.run_plan(plan, arguments))
        });
    }),
    Saboteur::new(
        "plans-read-factors",
        "plan.alpha-zero",
        "Multiplies A and B by the least positive number if alpha is 0.",
        |h| {
            run(h, |arguments| {
                if arguments.alpha == 0.0 {
                    arguments.alpha = f64::from(f32::from_bits(1));
                }
            });
        },
    ),
    Saboteur::new("plans-without-k-refused", "plan.alpha-zero", "Refuses plans with k 0.", |h| {
        h.handle.create_plan(|handle, options| match options.shape.k {
            0 => Err(wrong(ErrorKind::InvalidArgument, "create_plan")),
            _ => handle.create_plan(options),
        });
    }),
    Saboteur::new(
        "epilogue-lost-with-alpha-zero",
        "plan.alpha-zero",
        "Scales C and applies no epilogue if alpha is 0.",
        |h| {
            let plain = Note::<HashMap<(u64, PlanId), PlanId>>::default();
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
        },
    ),
    Saboteur::new("plans-ignore-the-output", "plan.mixed", "Makes plans for results of the factors' type.", |h| {
        planned(h, |options| options.shape.output = options.shape.data_type);
    }),
    Saboteur::new(
        "plans-between-elements",
        "plan.mixed",
        "Writes D where the next element begins, if it is between two.",
        |h| {
            run(h, |arguments| {
                arguments.d = DevicePtr::new(arguments.d.get().next_multiple_of(4));
                arguments.c = DevicePtr::new(arguments.c.get().next_multiple_of(4));
            });
        },
    ),
    Saboteur::new("destroyed-plans-run", "plan.stale", "Keeps plans that are destroyed.", |h| {
        let gone = Note::<Vec<PlanId>>::default();
        h.handle.destroy_plan(move |handle, plan| {
            let again = gone.with(|gone| gone.contains(&plan));
            if again || plan.get() == u64::MAX {
                return handle.destroy_plan(plan);
            }
            gone.with(|gone| gone.push(plan));
            Ok(())
        });
    }),
    Saboteur::new("unknown-plans-run", "plan.stale", "Runs plans that it does not know, as plans of nothing.", |h| {
        h.handle.run_plan(|handle, plan, arguments| {
            let done = handle.run_plan(plan, arguments);
            if is(&done, ErrorKind::InvalidHandle) { Ok(()) } else { done }
        });
    }),
    Saboteur::new("plans-destroyed-twice", "plan.stale", "Destroys plans as often as asked.", |h| {
        h.handle.destroy_plan(|handle, plan| {
            let gone = handle.destroy_plan(plan);
            if is(&gone, ErrorKind::InvalidHandle) { Ok(()) } else { gone }
        });
    }),
    Saboteur::new(
        "any-alignment",
        "plan.alignment",
        "Takes operands that are aligned to their elements and to no more.",
        |h| {
            planned(h, |options| options.alignment = options.shape.data_type.bytes());
        },
    ),
    Saboteur::new(
        "misaligned-as-unknown",
        "plan.alignment",
        "Calls operands that are not aligned an unknown plan.",
        |h| {
            h.handle.run_plan(|handle, plan, arguments| match handle.run_plan(plan, arguments) {
                Err(error) if error.kind() == ErrorKind::InvalidArgument => {
                    Err(wrong(ErrorKind::InvalidHandle, "run_plan"))
                }
                done => done,
            });
        },
    ),
];

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
