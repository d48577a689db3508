//! Work that is recorded once and queued again and again.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, Result, Stream, check};

impl Stream {
    /// Records what `work` queues instead of running it.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live stream; handles are written to locals, and the template is destroyed once instantiated.
        unsafe {
            driver!(cuStreamBeginCapture_v2(self.stream, mode))?;
            let worked = work();
            driver!(cuStreamEndCapture(self.stream, &mut graph))?;
            let instantiated = worked
                .and_then(|()| driver!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)));
            driver!(cuGraphDestroy(graph))?;
            instantiated?;
        }
        Ok(Graph { executable, _context: self.context.clone() })
    }

    /// Queues a recorded piece of work.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: what it touches lives as long as the backend that recorded it.
        unsafe { driver!(cuGraphLaunch(graph.executable, self.stream)) }
    }
}

/// Recorded work of a stream.
pub struct Graph {
    executable: sys::CUgraphExec,
    _context: Arc<Context>,
}

// SAFETY: a driver handle, usable from any thread.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}
