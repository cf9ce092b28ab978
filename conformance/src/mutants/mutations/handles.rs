//! BLAS handles: what they are bound to, how they are made and destroyed, and repeatable results.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use highwater_hal::{AtomicsMode, BlasKind, DevicePtr, ErrorKind, MathMode, PlanId, Workspace};

use super::super::hooks::Hooks;
use super::super::reference::{ReferenceHandle, forgiven, is};
use super::super::state::Shared;
use super::foreign_streams;

mutants! {
    in "blas.create-concurrent":
    "handles-made-under-a-lock": "Makes handles under a lock that every fill takes." => |h| {
        let lock = made_under_a_lock(h);
        h.backend.fill(move |reference, fill, stream| {
            let _beside = lock.read().unwrap_or_else(PoisonError::into_inner);
            reference.fill(fill, stream)
        });
    };

    "handles-made-under-a-lock-of-copies": "Makes handles under a lock that every copy takes." => |h| {
        let lock = made_under_a_lock(h);
        h.backend.copy(move |reference, copy, stream| {
            let _beside = lock.read().unwrap_or_else(PoisonError::into_inner);
            reference.copy(copy, stream)
        });
    };

    "handles-made-under-a-lock-of-products": "Makes handles under a lock that every product takes." => |h| {
        let lock = made_under_a_lock(h);
        h.handle.gemm(move |handle, gemm| {
            let _beside = lock.read().unwrap_or_else(PoisonError::into_inner);
            handle.gemm(gemm)
        });
    };

    in "blas.kind":
    "products-of-plan-handles" needs [has::lt_plans]: "Accepts products on a handle of kind Lt, and does nothing." =>
        |h| h.handle.gemm(|handle, gemm| {
            let done = handle.gemm(gemm);
            if handle.kind() == BlasKind::Lt && is(&done, ErrorKind::Unsupported) { Ok(()) } else { done }
        });
    "plans-of-product-handles": "Makes plans of handles of kind Blas that cannot be run." =>
        |h| h.handle.create_plan(|handle, options| {
            let made = handle.create_plan(options);
            let other = handle.kind() == BlasKind::Blas && is(&made, ErrorKind::Unsupported);
            if other { Ok(PlanId::new(1)) } else { made }
        });
    "one-kind-of-handle" needs [has::lt_plans]: "Reports the kind Blas for every handle." => |h| h.kind = Some(|_| BlasKind::Blas);

    in "blas.stream-bound":
    "bound-for-good": "Keeps a handle on the stream that was bound first." =>
        |h| h.handle.set_stream(|handle, stream| match handle.stream {
            None => handle.set_stream(stream),
            Some(bound) => {
                handle.backend.query_stream(stream)?;
                handle.set_stream(bound)
            }
        });
    "products-overtake": "Multiplies ahead of the earlier work of the bound stream." =>
        |h| h.handle.gemm(|handle, gemm| match handle.stream {
            Some(stream) if handle.kind() == BlasKind::Blas && handle.backend.is_pending(stream) => {
                handle.gemm_on_own_stream(gemm)
            }
            _ => handle.gemm(gemm),
        });

    "bound-by-each-thread": "Multiplies on the stream that the calling thread bound last, if it bound any." => |h| {
        let bound = Shared::<HashMap<(u64, std::thread::ThreadId), highwater_hal::StreamId>>::default();
        let last = bound.clone();
        h.handle.set_stream(move |handle, stream| {
            handle.set_stream(stream)?;
            bound.with(|bound| bound.insert((handle.raw(), std::thread::current().id()), stream));
            Ok(())
        });
        h.handle.gemm(move |handle, gemm| {
            let own = last.with(|last| last.get(&(handle.raw(), std::thread::current().id())).copied());
            match (own, handle.stream) {
                (Some(own), Some(stream)) if own != stream && handle.backend.query_stream(own).is_ok() => {
                    let workspace = handle.workspace;
                    handle.set_stream(own)?;
                    handle.gemm(gemm)?;
                    handle.set_stream(stream)?;
                    handle.set_workspace(workspace)
                }
                _ => handle.gemm(gemm),
            }
        });
    };

    in "blas.unbound":
    "multiplies-unbound": "Multiplies at once if no stream is bound." => |h| h.handle.gemm(|handle, gemm| match handle.stream {
        None if handle.kind() == BlasKind::Blas => handle.gemm_on_own_stream(gemm),
        _ => handle.gemm(gemm),
    });
    "unbound-runs-vanish" needs [has::lt_plans]: "Accepts a run of a plan if no stream is bound, and does nothing." =>
        |h| h.handle.run_plan(|handle, plan, arguments| match handle.stream {
            None => handle.run_plan(plan, arguments).or(Ok(())),
            Some(_) => handle.run_plan(plan, arguments),
        });

    in "blas.stream-device":
    "streams-of-other-devices": "Accepts a stream of another device, and keeps the old one." =>
        |h| h.handle.set_stream(|handle, stream| forgiven(ErrorKind::WrongDevice, handle.set_stream(stream), ()));

    in "blas.stream-destroyed":
    "products-of-gone-streams-vanish": "Accepts a product on a stream that was destroyed, and does nothing." =>
        |h| h.handle.gemm(|handle, gemm| match is_bound_to_nothing(handle) {
            true => forgiven(ErrorKind::InvalidHandle, handle.gemm(gemm), ()),
            false => handle.gemm(gemm),
        });
    "products-of-gone-streams-executed": "Multiplies at once if the bound stream was destroyed." =>
        |h| h.handle.gemm(|handle, gemm| match is_bound_to_nothing(handle) {
            true if handle.kind() == BlasKind::Blas => handle.gemm_on_own_stream(gemm),
            _ => handle.gemm(gemm),
        });
    "products-of-gone-foreign-ids-executed" needs [has::foreign_objects]: "Multiplies at once if the bound id of a foreign stream was destroyed." => |h| {
        let foreign = foreign_streams(h);
        h.handle.gemm(move |handle, gemm| {
            let is_foreign = handle.stream.is_some_and(|stream| foreign.with(|foreign| foreign.contains(&stream)));
            match is_foreign && handle.kind() == BlasKind::Blas && is_bound_to_nothing(handle) {
                true => handle.gemm_on_own_stream(gemm),
                false => handle.gemm(gemm),
            }
        });
    };
    "runs-on-gone-streams-vanish" needs [has::lt_plans]: "Accepts a run of a plan on a stream that was destroyed, and does nothing." =>
        |h| h.handle.run_plan(|handle, plan, arguments| match is_bound_to_nothing(handle) {
            true => forgiven(ErrorKind::InvalidHandle, handle.run_plan(plan, arguments), ()),
            false => handle.run_plan(plan, arguments),
        });

    in "blas.destroy-pending":
    "products-spoiled-with-their-handle": "Spoils the last product that is outstanding when its handle is destroyed." => |h| {
        let results = Shared::<HashMap<u64, DevicePtr>>::default();
        let noted = results.clone();
        h.handle.gemm(move |handle, gemm| {
            handle.gemm(gemm)?;
            noted.with(|noted| noted.insert(handle.raw(), gemm.c));
            Ok(())
        });
        h.handle.destroy(move |handle| {
            let result = results.with(|results| results.remove(&handle.raw()));
            if let (Some(result), Some(stream)) = (result, handle.stream)
                && handle.backend.is_pending(stream)
            {
                handle.backend.overwrite(handle.device(), result, 16, stream);
            }
            handle.destroy()
        });
    };

    in "blas.stream-resets-workspace":
    "workspace-survives-a-stream" needs [has::blas_workspace]: "Keeps its workspace when a stream is bound, and reports that it does not." =>
        |h| h.handle.set_stream(|handle, stream| {
            handle.set_stream(stream)?;
            let workspace = handle.workspace;
            handle.set_workspace(workspace)
        });
    "precision-lost-with-a-stream" needs [has::tf32]: "Turns TF32 on when a stream is bound." => |h| h.handle.set_stream(|handle, stream| {
        let again = handle.stream.is_some();
        handle.set_stream(stream)?;
        if again { handle.set_math_mode(MathMode::Tf32) } else { Ok(()) }
    });
    "atomics-allowed-by-a-stream" needs [has::atomics_mode]: "Allows atomics when a stream is bound." => |h| h.handle.set_stream(|handle, stream| {
        let again = handle.stream.is_some();
        handle.set_stream(stream)?;
        if again { handle.set_atomics_mode(AtomicsMode::Allowed) } else { Ok(()) }
    });

    in "blas.workspace-used":
    "workspace-ignored" survives "a vendor's product need not touch the workspace that is bound, so its bytes prove nothing; \
        that a product writes to no other memory that the suite can see is checked":
        "Takes a workspace, and keeps its intermediate results elsewhere." =>
        |h| h.handle.set_workspace(|handle, workspace| {
            handle.set_workspace(workspace)?;
            handle.set_workspace(None)
        });
    "first-workspace-stays": "Stays with the workspace that was bound first." =>
        |h| h.handle.set_workspace(|handle, workspace| match handle.workspace {
            Some(_) if workspace.is_some() => Ok(()),
            _ => handle.set_workspace(workspace),
        });
    "workspace-not-given-up": "Keeps the workspace when its own is to be bound." =>
        |h| h.handle.set_workspace(|handle, workspace| match workspace {
            None => Ok(()),
            workspace => handle.set_workspace(workspace),
        });
    "beside-the-workspace": "Writes a few bytes behind the workspace." => |h| h.handle.gemm(|handle, gemm| {
        handle.gemm(gemm)?;
        if let (Some(workspace), Some(stream)) = (handle.workspace, handle.stream) {
            handle.backend.overwrite(handle.device(), workspace.ptr.offset(workspace.bytes), 16, stream);
        }
        Ok(())
    });
    "one-workspace-for-all": "Multiplies with the workspace that any handle was given last." => |h| {
        let last = Shared::<Option<Workspace>>::default();
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
    };

    in "blas.workspace-alignment":
    "misaligned-workspaces": "Accepts a misaligned workspace, from its first aligned address." =>
        |h| h.handle.set_workspace(|handle, workspace| {
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

    "misaligned-workspaces-of-nothing": "Accepts a misaligned workspace of 0 bytes." =>
        |h| h.handle.set_workspace(|handle, workspace| {
            let bound = handle.set_workspace(workspace);
            match workspace {
                Some(Workspace { bytes: 0, .. }) => forgiven(ErrorKind::InvalidArgument, bound, ()),
                _ => bound,
            }
        });
    "refused-workspaces-unbind": "Leaves a handle without its workspace when it refuses another." =>
        |h| h.handle.set_workspace(|handle, workspace| {
            let bound = handle.set_workspace(workspace);
            if is(&bound, ErrorKind::InvalidArgument) {
                handle.set_workspace(None)?;
            }
            bound
        });

    in "blas.deterministic":
    "atomics-stay" needs [has::atomics_mode]: "Keeps to atomics once they were allowed." => |h| h.handle.set_atomics_mode(|handle, mode| match mode {
        AtomicsMode::Allowed => handle.set_atomics_mode(mode),
        _ => Ok(()),
    });
    "atomics-always" needs [has::atomics_mode]: "Allows atomics in every mode." =>
        |h| h.handle.set_atomics_mode(|handle, _| handle.set_atomics_mode(AtomicsMode::Allowed));
    "plans-with-atomics" needs [has::lt_plans]: "Makes plans that add with atomics." =>
        |h| h.handle.create_plan(|handle, options| handle.create_plan(&options.with_atomics_mode(AtomicsMode::Allowed)));

    in "blas.reset":
    "settings-stay": "Resets nothing of a handle, and reports success." => |h| h.handle.reset(|_| Ok(()));
    "reset-forgets-the-precision" needs [has::tf32]: "Resets every setting of a handle but TF32." => |h| h.handle.reset(|handle| {
        handle.reset()?;
        handle.set_math_mode(MathMode::Tf32)
    });

    in "blas.destroyed":
    "handles-not-counted": "Leaves handles out of its counts." => |h| h.count(|live| live.handles = 0);
    "dropped-handles-stay": "Forgets handles that are dropped, and destroys them never." =>
        |h| h.forgets_dropped_handles = true;
    "handles-destroyed-twice": "Destroys handles as often as asked." =>
        |h| h.handle.destroy(|handle| forgiven(ErrorKind::InvalidHandle, handle.destroy(), ()));
    "destroyed-handles-bound": "Accepts a stream for a destroyed handle." => |h| h.handle.set_stream(|handle, stream| {
        let bound = handle.set_stream(stream);
        let stale = handle.backend.query_stream(stream).is_err();
        if is(&bound, ErrorKind::InvalidHandle) && !stale { Ok(()) } else { bound }
    });
}

/// Returns whether the stream that was bound is gone.
fn is_bound_to_nothing(handle: &ReferenceHandle) -> bool {
    let is_gone = |stream| is(&handle.backend.query_stream(stream), ErrorKind::InvalidHandle);
    handle.stream.is_some_and(is_gone)
}

/// Makes handles slowly, each under the lock.
fn made_under_a_lock(h: &mut Hooks) -> Arc<RwLock<()>> {
    let lock = Arc::new(RwLock::new(()));
    let shared = Arc::clone(&lock);
    h.backend.create_blas_handle(move |reference, device, options| {
        let _alone = shared.write().unwrap_or_else(PoisonError::into_inner);
        std::thread::sleep(Duration::from_millis(40));
        reference.create_blas_handle(device, options)
    });
    lock
}
