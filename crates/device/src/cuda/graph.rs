//! CUDA graphs: work that is recorded once and submitted as one, and its timing.

use std::sync::Arc;

use cudarc::driver::{result, sys};
use formats::{Error, Result};

use super::{BoundProduct, Collective, Context, CudaBuffer, CudaLaunch, Gpu};

/// An item of work that can be enqueued or recorded in a [`Graph`].
#[derive(Clone)]
pub enum GraphWork {
    /// A kernel.
    Launch(CudaLaunch),
    /// A matrix product of cuBLASLt.
    Product(BoundProduct),
    /// A copy of a whole buffer.
    Copy {
        /// The destination.
        to: CudaBuffer,
        /// The source.
        from: CudaBuffer,
    },
    /// A collective operation of several GPUs.
    Collective(Collective),
}

impl GraphWork {
    /// Enqueues it after all earlier work.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn enqueue(&self) -> Result<()> {
        match self {
            GraphWork::Launch(launch) => launch.enqueue(),
            GraphWork::Product(product) => product.enqueue(),
            GraphWork::Copy { to, from } => to.copy_from(from),
            GraphWork::Collective(collective) => collective.enqueue(),
        }
    }
}

/// A recorded sequence of work, submitted as one.
pub struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
    /// Keeps alive what the graph refers to.
    _work: Vec<GraphWork>,
}

// SAFETY: the handle may be used from any one thread at a time while the context lives; `replay`
// takes `&mut self`.
unsafe impl Send for Graph {}

impl Gpu {
    /// Records work without running it.
    ///
    /// # Errors
    /// The driver refuses some of it.
    pub fn graph(&self, work: Vec<GraphWork>) -> Result<Graph> {
        self.graph_with(work, |_| Ok(()))
    }

    /// As [`graph`](Gpu::graph); `before(i)` may enqueue more before item `i` and after the last.
    fn graph_with(
        &self,
        work: Vec<GraphWork>,
        before: impl Fn(usize) -> Result<()>,
    ) -> Result<Graph> {
        let context = &self.0;
        context.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the context.
        let begun = unsafe { result::stream::begin_capture(context.stream, mode) };
        context.check("cuda graph", begun)?;
        let one = |(i, work): (usize, &GraphWork)| before(i).and_then(|()| work.enqueue());
        let recorded = work.iter().enumerate().try_for_each(one).and_then(|()| before(work.len()));
        // SAFETY: as above. Ended whatever happened, or the stream would stay in capture.
        let graph = unsafe { result::stream::end_capture(context.stream) };
        recorded?;
        let graph = context.check("cuda graph", graph)?;
        if graph.is_null() {
            return Err(Error::new("cuda graph", "work", "none"));
        }
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was made just now, and its executable does not need it any more.
        let made = unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result();
            let _ = result::graph::destroy(graph);
            made
        };
        context.check("cuda graph", made)?;
        Ok(Graph { context: Arc::clone(context), executable, _work: work })
    }

    /// Runs each item once, without overlap, and returns its seconds. The timing events are part of
    /// the graph, so that no host time is included.
    ///
    /// # Errors
    /// The driver refuses, or a kernel fails.
    pub fn time_each(&self, work: Vec<GraphWork>) -> Result<Vec<f64>> {
        let event = |_| Event::new(&self.0, sys::CUevent_flags::CU_EVENT_DEFAULT);
        let events = (0..=work.len()).map(event).collect::<Result<Vec<_>>>()?;
        let apart = |work| match work {
            GraphWork::Launch(launch) => GraphWork::Launch(launch.apart()),
            GraphWork::Collective(sum) => GraphWork::Collective(sum.apart()),
            other => other,
        };
        let work = work.into_iter().map(apart).collect();
        self.graph_with(work, |i| events[i].record_in_graph())?.replay()?;
        events.windows(2).map(|pair| pair[1].since(&pair[0])).collect()
    }

    /// Measures the seconds that a sequence of work takes.
    ///
    /// It is recorded as a graph, so that gaps between items are the device's own. After a warm-up,
    /// at least `samples` runs of at least 300 us are timed by events on the device.
    ///
    /// # Errors
    /// The driver refuses, or a kernel fails.
    pub fn time(&self, work: Vec<GraphWork>, samples: usize) -> Result<Samples> {
        const RUN: f64 = 300e-6;
        let count = work.len().max(1) as f64;
        let mut run = self.runs(work)?;
        run(1)?;
        let once = run(1)?.max(1e-6);
        let times = (RUN / once).ceil().clamp(1.0, 1000.0) as u32;
        run(times)?;
        let mut found = Vec::with_capacity(samples.max(1));
        for _ in 0..samples.max(1) {
            found.push(run(times)? / f64::from(times) / count);
        }
        found.sort_by(f64::total_cmp);
        Ok(Samples { median: found[found.len() / 2], least: found[0], samples: found.len() })
    }

    /// As [`time`](Gpu::time), the least of three single runs: enough to choose between ways that
    /// differ by some percent, in little more time than the work takes.
    ///
    /// # Errors
    /// The driver refuses, or a kernel fails.
    pub fn time_roughly(&self, work: Vec<GraphWork>) -> Result<f64> {
        let count = work.len().max(1) as f64;
        let mut run = self.runs(work)?;
        run(1)?;
        let mut least = f64::INFINITY;
        for _ in 0..3 {
            least = least.min(run(1)?);
        }
        Ok(least / count)
    }

    /// A function that runs work a given number of times and returns the seconds of all runs.
    fn runs(&self, work: Vec<GraphWork>) -> Result<impl FnMut(u32) -> Result<f64>> {
        let mut graph = self.graph(work)?;
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let (start, end) = (Event::new(&self.0, flags)?, Event::new(&self.0, flags)?);
        Ok(move |times: u32| {
            start.record()?;
            for _ in 0..times {
                graph.replay()?;
            }
            end.record()?;
            end.since(&start)
        })
    }
}

impl Graph {
    /// Enqueues the whole graph.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn replay(&mut self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: graph and stream live; what the graph refers to is held in `_work`.
        let launched = unsafe { result::graph::launch(self.executable, self.context.stream) };
        self.context.check("cuda graph", launched)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        drop(self.context.synchronize());
        // SAFETY: made by instantiation, destroyed only here, and not running.
        let _ = unsafe { result::graph::exec_destroy(self.executable) };
    }
}

/// The result of [`Gpu::time`], in seconds per item of work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Samples {
    /// The median.
    pub median: f64,
    /// The shortest.
    pub least: f64,
    /// Number of runs.
    pub samples: usize,
}

/// A CUDA event: complete until it is first recorded.
pub struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: the handle is valid on any thread while the context lives, which `context` sees to; the
// driver guards it.
unsafe impl Send for Event {}

impl Gpu {
    /// Creates an event without timing.
    ///
    /// # Errors
    /// The driver has no events left.
    pub fn event(&self) -> Result<Event> {
        Event::new(&self.0, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }
}

impl Event {
    fn new(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Event> {
        context.enter()?;
        let handle = context.check("cuda event", result::event::create(flags))?;
        Ok(Event { context: Arc::clone(context), handle })
    }

    /// Records the event after everything enqueued so far.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn record(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: event and stream live.
        let recorded = unsafe { result::event::record(self.handle, self.context.stream) };
        self.context.check("cuda event", recorded)
    }

    /// Records the event as a node of the graph that is being captured.
    fn record_in_graph(&self) -> Result<()> {
        let flags = sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32;
        self.context.enter()?;
        // SAFETY: event and stream live; the graph is dropped before the events are.
        let recorded =
            unsafe { sys::cuEventRecordWithFlags(self.handle, self.context.stream, flags) };
        self.context.check("cuda event", recorded.result())
    }

    /// Waits until the work before the latest record is done.
    ///
    /// # Errors
    /// A failure of an earlier kernel.
    pub fn wait(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: the event lives.
        let waited = unsafe { result::event::synchronize(self.handle) };
        self.context.check("cuda", waited)
    }

    /// Seconds since another event; waits for both.
    fn since(&self, start: &Event) -> Result<f64> {
        self.wait()?;
        // SAFETY: both events live and are recorded.
        let elapsed = unsafe { result::event::elapsed(start.handle, self.handle) };
        Ok(f64::from(self.context.check("cuda event", elapsed)?) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        drop(self.context.enter());
        // SAFETY: made by `event::create`, destroyed only here.
        let _ = unsafe { result::event::destroy(self.handle) };
    }
}
