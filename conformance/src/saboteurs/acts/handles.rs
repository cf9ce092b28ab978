//! BLAS handles: what they are bound to, how they are made and destroyed, and repeatable results.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use highwater_hal::{AtomicsMode, BlasKind, DevicePtr, ErrorKind, MathMode, PlanId, Workspace};

use super::super::Saboteur;
use super::super::honest::is;
use super::super::note::Note;

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new(
        "handles-made-under-a-lock",
        "blas.create-concurrent",
        "Makes handles under a lock that every fill takes.",
        |h| {
            let lock = Arc::new(RwLock::new(()));
            let shared = Arc::clone(&lock);
            h.backend.create_blas_handle(move |honest, device, options| {
                let _alone = lock.write().unwrap_or_else(PoisonError::into_inner);
                std::thread::sleep(Duration::from_millis(40));
                honest.create_blas_handle(device, options)
            });
            h.backend.fill(move |honest, fill, stream| {
                let _beside = shared.read().unwrap_or_else(PoisonError::into_inner);
                honest.fill(fill, stream)
            });
        },
    ),
    Saboteur::new(
        "products-of-plan-handles",
        "blas.kind",
        "Takes products for a handle of kind Lt, and does nothing.",
        |h| {
            h.handle.gemm(|handle, gemm| {
                let done = handle.gemm(gemm);
                if handle.kind() == BlasKind::Lt && is(&done, ErrorKind::Unsupported) { Ok(()) } else { done }
            });
        },
    ),
    Saboteur::new(
        "plans-of-product-handles",
        "blas.kind",
        "Makes plans of handles of kind Blas that cannot be run.",
        |h| {
            h.handle.create_plan(|handle, options| {
                let made = handle.create_plan(options);
                let other = handle.kind() == BlasKind::Blas && is(&made, ErrorKind::Unsupported);
                if other { Ok(PlanId::new(1)) } else { made }
            });
        },
    ),
    Saboteur::new("one-kind-of-handle", "blas.kind", "Says of every handle that it was made as Blas.", |h| {
        h.kind = Some(|_| BlasKind::Blas);
    }),
    Saboteur::new("bound-for-good", "blas.stream-bound", "Keeps a handle on the stream that was bound first.", |h| {
        h.handle.set_stream(|handle, stream| match handle.stream {
            None => handle.set_stream(stream),
            Some(bound) => {
                handle.backend.query_stream(stream)?;
                handle.set_stream(bound)
            }
        });
    }),
    Saboteur::new(
        "products-overtake",
        "blas.stream-bound",
        "Multiplies before what the bound stream has to do already.",
        |h| {
            h.handle.gemm(|handle, gemm| match handle.stream {
                Some(stream) if handle.kind() == BlasKind::Blas && handle.backend.is_busy(stream) => {
                    handle.gemm_aside(gemm)
                }
                _ => handle.gemm(gemm),
            });
        },
    ),
    Saboteur::new("multiplies-unbound", "blas.unbound", "Multiplies at once if no stream is bound.", |h| {
        h.handle.gemm(|handle, gemm| match handle.stream {
            None if handle.kind() == BlasKind::Blas => handle.gemm_aside(gemm),
            _ => handle.gemm(gemm),
        });
    }),
    Saboteur::new(
        "unbound-runs-vanish",
        "blas.unbound",
        "Accepts a run of a plan if no stream is bound, and does nothing.",
        |h| {
            h.handle.run_plan(|handle, plan, arguments| match handle.stream {
                None => handle.run_plan(plan, arguments).or(Ok(())),
                Some(_) => handle.run_plan(plan, arguments),
            });
        },
    ),
    Saboteur::new(
        "streams-of-other-devices",
        "blas.stream-device",
        "Stays with its stream where the new one is of another device.",
        |h| {
            h.handle.set_stream(|handle, stream| {
                let bound = handle.set_stream(stream);
                if is(&bound, ErrorKind::WrongDevice) { Ok(()) } else { bound }
            });
        },
    ),
    Saboteur::new(
        "workspace-survives-a-stream",
        "blas.stream-resets-workspace",
        "Keeps its workspace when a stream is bound, and says that it does not.",
        |h| {
            h.handle.set_stream(|handle, stream| {
                handle.set_stream(stream)?;
                let workspace = handle.workspace;
                handle.set_workspace(workspace)
            });
        },
    ),
    Saboteur::new(
        "precision-lost-with-a-stream",
        "blas.stream-resets-workspace",
        "Turns TF32 on when a stream is bound.",
        |h| {
            h.handle.set_stream(|handle, stream| {
                let again = handle.stream.is_some();
                handle.set_stream(stream)?;
                if again { handle.set_math_mode(MathMode::Tf32) } else { Ok(()) }
            });
        },
    ),
    Saboteur::new(
        "atomics-allowed-by-a-stream",
        "blas.stream-resets-workspace",
        "Allows atomics when a stream is bound.",
        |h| {
            h.handle.set_stream(|handle, stream| {
                let again = handle.stream.is_some();
                handle.set_stream(stream)?;
                if again { handle.set_atomics_mode(AtomicsMode::Allowed) } else { Ok(()) }
            });
        },
    ),
    Saboteur::new(
        "workspace-ignored",
        "blas.workspace-used",
        "Takes a workspace, and keeps its intermediate results elsewhere.",
        |h| {
            h.handle.set_workspace(|handle, workspace| {
                handle.set_workspace(workspace)?;
                handle.set_workspace(None)
            });
        },
    )
    .survives(
        "a vendor's product need not touch the workspace that is bound, so its bytes prove nothing; that a product \
         writes to no other memory that the suite can see is checked",
    ),
    Saboteur::new(
        "first-workspace-stays",
        "blas.workspace-used",
        "Stays with the workspace that was bound first.",
        |h| {
            h.handle.set_workspace(|handle, workspace| match handle.workspace {
                Some(_) if workspace.is_some() => Ok(()),
                _ => handle.set_workspace(workspace),
            });
        },
    ),
    Saboteur::new(
        "workspace-not-given-up",
        "blas.workspace-used",
        "Stays with the workspace where its own is to be bound.",
        |h| {
            h.handle.set_workspace(|handle, workspace| match workspace {
                None => Ok(()),
                workspace => handle.set_workspace(workspace),
            });
        },
    ),
    Saboteur::new("beside-the-workspace", "blas.workspace-used", "Writes a few bytes behind the workspace.", |h| {
        h.handle.gemm(|handle, gemm| {
            handle.gemm(gemm)?;
            if let (Some(workspace), Some(stream)) = (handle.workspace, handle.stream) {
                handle.backend.smear(handle.device(), workspace.ptr.offset(workspace.bytes), 16, stream);
            }
            Ok(())
        });
    }),
    Saboteur::new(
        "one-workspace-for-all",
        "blas.workspace-used",
        "Multiplies with the workspace that any handle was given last.",
        |h| {
            let last = Note::<Option<Workspace>>::default();
            let bound = last.clone();
            h.handle.set_workspace(move |handle, workspace| {
                bound.set(workspace);
                handle.set_workspace(workspace)
            });
            h.handle.gemm(move |handle, gemm| {
                if let (Some(workspace), Some(_)) = (last.get(), handle.workspace) {
                    // Memory that has gone is refused, and the handle stays with its own.
                    let _ = handle.set_workspace(Some(workspace));
                }
                handle.gemm(gemm)
            });
        },
    ),
    Saboteur::new(
        "misaligned-workspaces",
        "blas.workspace-alignment",
        "Takes a workspace that is not aligned, from the next address that is.",
        |h| {
            h.handle.set_workspace(|handle, workspace| {
                let bound = handle.set_workspace(workspace);
                match workspace {
                    Some(workspace) if is(&bound, ErrorKind::InvalidArgument) && workspace.bytes >= 4096 => {
                        let alignment = handle.backend.capabilities(handle.device())?.workspace_alignment as u64;
                        let ptr = DevicePtr::new(workspace.ptr.get().next_multiple_of(alignment));
                        let bytes = workspace.bytes - (ptr.get() - workspace.ptr.get()) as usize;
                        handle.set_workspace(Some(Workspace { ptr, bytes }))
                    }
                    _ => bound,
                }
            });
        },
    ),
    Saboteur::new("atomics-stay", "blas.deterministic", "Keeps to atomics once they were allowed.", |h| {
        h.handle.set_atomics_mode(|handle, mode| match mode {
            AtomicsMode::Allowed => handle.set_atomics_mode(mode),
            _ => Ok(()),
        });
    }),
    Saboteur::new("atomics-always", "blas.deterministic", "Adds with atomics whatever is asked for.", |h| {
        h.handle.set_atomics_mode(|handle, _| handle.set_atomics_mode(AtomicsMode::Allowed));
    }),
    Saboteur::new("plans-with-atomics", "blas.deterministic", "Makes plans that add with atomics.", |h| {
        h.handle.create_plan(|handle, options| handle.create_plan(&options.with_atomics_mode(AtomicsMode::Allowed)));
    }),
    Saboteur::new("settings-stay", "blas.reset", "Resets nothing of a handle, and reports success.", |h| {
        h.handle.reset(|_| Ok(()));
    }),
    Saboteur::new("reset-forgets-the-precision", "blas.reset", "Resets every setting of a handle but TF32.", |h| {
        h.handle.reset(|handle| {
            handle.reset()?;
            handle.set_math_mode(MathMode::Tf32)
        });
    }),
    Saboteur::new("handles-not-counted", "blas.destroyed", "Leaves handles out of its counts.", |h| {
        h.count(|live| live.handles = 0);
    }),
    Saboteur::new(
        "dropped-handles-stay",
        "blas.destroyed",
        "Forgets handles that are dropped, and destroys them never.",
        |h| {
            h.forgets_dropped_handles = true;
        },
    ),
    Saboteur::new("handles-destroyed-twice", "blas.destroyed", "Destroys handles as often as asked.", |h| {
        h.handle.destroy(|handle| {
            let gone = handle.destroy();
            if is(&gone, ErrorKind::InvalidHandle) { Ok(()) } else { gone }
        });
    }),
    Saboteur::new(
        "destroyed-handles-bound",
        "blas.destroyed",
        "Takes a stream for a handle that was destroyed.",
        |h| {
            h.handle.set_stream(|handle, stream| {
                let bound = handle.set_stream(stream);
                let stale = handle.backend.query_stream(stream).is_err();
                if is(&bound, ErrorKind::InvalidHandle) && !stale { Ok(()) } else { bound }
            });
        },
    ),
];
