//! The workspaces of a stream and of its captures.

use super::core::StreamCore;
use crate::pool::workspaces::IdleWorkspace;
use highwater_hal::{BlasKind, ErrorKind, Result, Workspace};

impl StreamCore {
    /// Takes a workspace of `bytes` for work that is enqueued on the stream from here on. Returns `None` for 0 bytes.
    ///
    /// # Errors
    /// `Capture` if the stream takes part in a capture, which cannot wait for earlier work of the workspace.
    pub(crate) fn take_workspace(&self, bytes: usize) -> Result<Option<Workspace>> {
        let device = self.id.device();
        if bytes == 0 {
            return Ok(None);
        }
        let Some(idle) = self.workspaces.take(device, bytes) else {
            return self.workspaces.allocate(device, bytes).map(Some);
        };
        if let Some(completion) = &idle.after {
            let wait = |_submission| self.services.backend.stream_wait_event(self.id, completion.event());
            if let Err(error) = self.enter_outside("stream_wait_event").and_then(wait) {
                self.workspaces.give_back(device, idle);
                return Err(error);
            }
        }
        Ok(Some(idle.workspace))
    }

    /// Returns a workspace to the pool, for use after the work enqueued on the stream so far.
    pub(crate) fn give_back_workspace(&self, workspace: Workspace) {
        match self.completion() {
            Ok(completion) => {
                self.workspaces.give_back(self.id.device(), IdleWorkspace { workspace, after: Some(completion) })
            }
            // It stays in the list of all workspaces, is used by no stream, and is freed when the runtime ends.
            Err(error) => self.services.count_failed_release(&error),
        }
    }

    /// Returns the workspace for the stream's calls of one kind, allocated by the first of them.
    fn workspace(&self, kind: BlasKind) -> Result<Option<Workspace>> {
        let bytes = self.services.device(self.id.device()).workspace_bytes(kind);
        if let Some(workspace) = self.existing_workspace(kind, bytes) {
            return Ok(workspace);
        }
        // One thread allocates, outside the lock. The others wait for it instead of allocating unneeded workspaces.
        let mut making = self.making_workspace.lock();
        while *making {
            self.workspace_made.wait(&mut making);
        }
        if let Some(workspace) = self.existing_workspace(kind, bytes) {
            return Ok(workspace);
        }
        *making = true;
        drop(making);
        let _made = Made(self);
        let workspace = self.take_workspace(bytes)?;
        let cell = if kind == BlasKind::Lt { &self.lt_workspace } else { &self.blas_workspace };
        Ok(*cell.get_or_init(|| workspace))
    }

    /// Returns the key of the stream if the first call of a kind has to find a workspace for it.
    pub(crate) fn lacking_workspace(&self, kind: BlasKind) -> Option<u64> {
        let bytes = self.services.device(self.id.device()).workspace_bytes(kind);
        (bytes > 0 && self.existing_workspace(kind, bytes).is_none()).then_some(self.key)
    }

    /// Returns an existing workspace of sufficient size. Lt calls use the BLAS workspace if there is one: all calls of the
    /// stream share its submission lock.
    fn existing_workspace(&self, kind: BlasKind, bytes: usize) -> Option<Option<Workspace>> {
        let blas = self.blas_workspace.get().copied();
        if kind != BlasKind::Lt {
            return blas;
        }
        let large_enough = |blas: &Option<Workspace>| blas.map_or(0, |workspace| workspace.bytes) >= bytes;
        self.lt_workspace.get().copied().or_else(|| blas.filter(large_enough))
    }

    /// Returns the key and the workspace to which a handle must be bound for calls on this stream.
    pub(crate) fn binding(&self, kind: BlasKind) -> Result<(u64, Option<Workspace>)> {
        let bytes = self.services.device(self.id.device()).workspace_bytes(kind);
        // No capture, as far as is visible without the submission lock. A call that enqueues checks the key again under the
        // lock.
        if self.bound_as() == self.key
            && let Some(workspace) = self.existing_workspace(kind, bytes)
        {
            return Ok((self.key, workspace));
        }
        loop {
            let mut submission = self.lock_submission();
            let Some(recording) = &mut submission.recording else {
                drop(submission);
                match self.workspace(kind) {
                    // A capture has begun in the meantime.
                    Err(error) if error.kind() == ErrorKind::Capture && self.lock_submission().recording.is_some() => {
                        continue;
                    }
                    workspace => return Ok((self.key, workspace?)),
                }
            };
            let key = recording.key;
            if let Some(workspace) = recording.existing_workspace(kind, bytes) {
                return Ok((key, workspace));
            }
            let reserved = recording.take_reserved(bytes);
            drop(submission);
            let idle = match reserved {
                _ if bytes == 0 => None,
                Some(idle) => Some(idle),
                None => Some(self.workspaces.take_or_allocate(self.id.device(), bytes)?),
            };
            let mut submission = self.lock_submission();
            let recording = submission.recording.as_mut().filter(|recording| recording.key == key);
            if let Some(recording) = recording
                && recording.existing_workspace(kind, bytes).is_none()
            {
                let workspace = idle.as_ref().map(|idle| idle.workspace);
                let place =
                    if kind == BlasKind::Lt { &mut recording.lt_workspace } else { &mut recording.blas_workspace };
                *place = Some(workspace);
                if let Some(idle) = idle {
                    recording.own(idle);
                }
                return Ok((key, workspace));
            }
            drop(submission);
            // Another thread was faster, or the capture has ended in the meantime.
            if let Some(idle) = idle {
                self.workspaces.give_back(self.id.device(), idle);
            }
        }
    }

    /// Takes a workspace that belongs to the capture in which the stream takes part, for one call of foreign code. Returns it with the
    /// key of the stream's part, or `None` if there is no capture.
    pub(crate) fn take_captured_workspace(&self, bytes: usize) -> Result<Option<(u64, Workspace)>> {
        let key = {
            let mut submission = self.lock_submission();
            let Some(recording) = &mut submission.recording else { return Ok(None) };
            if let Some(workspace) = recording.take_returned(bytes) {
                return Ok(Some((recording.key, workspace)));
            }
            recording.key
        };
        let idle = self.workspaces.take_or_allocate(self.id.device(), bytes)?;
        let mut submission = self.lock_submission();
        match submission.recording.as_mut().filter(|recording| recording.key == key) {
            Some(recording) => {
                let workspace = idle.workspace;
                recording.own(idle);
                Ok(Some((key, workspace)))
            }
            None => {
                drop(submission);
                self.workspaces.give_back(self.id.device(), idle);
                Ok(None)
            }
        }
    }

    /// Gives a workspace back to the capture, if the stream still takes part in it.
    pub(crate) fn give_back_captured_workspace(&self, key: u64, workspace: Workspace) {
        let mut submission = self.lock_submission();
        if let Some(recording) = submission.recording.as_mut().filter(|recording| recording.key == key) {
            recording.returned.push(workspace);
        }
    }
}

/// Wakes the threads that wait for a stream's workspace, even if its allocation failed. Then the next thread tries.
struct Made<'s>(&'s StreamCore);

impl Drop for Made<'_> {
    fn drop(&mut self) {
        *self.0.making_workspace.lock() = false;
        self.0.workspace_made.notify_all();
    }
}
