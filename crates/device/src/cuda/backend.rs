//! The shared lowering on an NVIDIA GPU.

use std::ops::Range;

use formats::{Error, Result};
use tile::Kernel;
use tile::launch::Numbers;
use tile::passes::Target;

use super::{Buffer, Gpu, Graph, Launch, Pipeline, Work, roof};
use crate::About;
use crate::gpu::{Backend, Facts};

impl Backend for Gpu {
    type Buffer = Buffer;
    type Pipeline = Pipeline;
    type Launch = Launch;
    type Recording = Graph;

    fn about(&self) -> About {
        let facts = self.facts();
        About { name: "cuda", threads: facts.multiprocessors as usize, isa: facts.name.clone() }
    }

    fn facts(&self) -> Facts {
        let super::Facts { multiprocessors, shared, .. } = *self.facts();
        Facts { target: Target::Cuda, processors: multiprocessors, shared }
    }

    fn buffer(&self, bytes: usize) -> Result<Buffer> {
        let buffer = Gpu::buffer(self, bytes)?;
        buffer.fill(0)?;
        Ok(buffer)
    }

    fn mailbox(&self, words: usize) -> Result<Buffer> {
        self.host_buffer(4 * words)
    }

    fn peek(&self, mailbox: &Buffer, word: usize) -> Result<Option<[u32; 2]>> {
        let look = || mailbox.look(word).map(|found| Some(found).filter(|f| f[0] != u32::MAX));
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        if !self.idle()? {
            return Ok(None);
        }
        // What was written before the work ended can be seen now.
        let missing = || Error::new("cuda mailbox", "a note", "none");
        look()?.map(Some).ok_or_else(missing)
    }

    fn poke(&self, mailbox: &Buffer, word: usize, value: u32) -> Result<()> {
        mailbox.put(word, value)
    }

    fn part(&self, of: &Buffer, range: Range<usize>) -> Result<Buffer> {
        of.part(range)
    }

    fn write(&self, to: &Buffer, bytes: &[u8]) -> Result<()> {
        to.part(0..bytes.len())?.write(bytes)
    }

    fn read(&self, from: &Buffer, to: &mut [u8]) -> Result<()> {
        from.part(0..to.len())?.read(to)
    }

    fn copy(&self, from: &Buffer, to: &Buffer) -> Result<()> {
        to.part(0..from.len())?.copy_from(from)
    }

    fn ahead(&self, kernels: &[&Kernel]) {
        // What cannot be printed is reported when it is loaded.
        let text = |kernel: &&Kernel| Gpu::source(kernel, &Numbers::new()).ok();
        self.compiler().ahead(kernels, |kernel| text(kernel).into_iter().collect());
    }

    fn load(&self, kernel: &Kernel) -> Result<Pipeline> {
        Gpu::load(self, kernel, &Numbers::new())
    }

    fn bind(&self, pipeline: &Pipeline, numbers: &Numbers, buffers: &[Buffer]) -> Result<Launch> {
        Ok(pipeline.bind(numbers, buffers)?.overlapping())
    }

    fn submit(&self, launches: &[Launch]) -> Result<()> {
        launches.iter().try_for_each(Launch::enqueue)
    }

    fn record(&self, launches: &[Launch]) -> Result<Graph> {
        self.graph(launches.iter().cloned().map(Work::Launch).collect())
    }

    fn replay(&self, recording: &mut Graph) -> Result<()> {
        recording.replay()
    }

    fn read_rate(&self) -> f64 {
        roof::read_rate(self).unwrap_or(0.0)
    }
}
