//! Sums over GPUs that reach each other's memory, of one process or of several, for as few values as
//! a step of few rows has: NCCL takes 15 us for them, two times a layer.
//!
//! Every rank writes its values into a mailbox of each other rank, each value in one word of 64 bits
//! with the number of the round, and waits until its own mailboxes have the words of this round:
//! one way over the link, and no other message. (NCCL's documents call such words "LL".) Values are
//! added in the order of the ranks, so that all have the same bits.
//!
//! A mailbox has two halves that take turns. A rank writes round `n + 2` only once it has
//! everybody's values of `n + 1`, which they send once they are done with round `n`.
//!
//! In a graph, the product in front may write its results into the mailboxes itself, its own rank's
//! among them, one by one as they are complete. Then the sum waits for words alone and may be
//! running long before that product is: nothing tells it how far the work in front of both is, so
//! that a round is a number that rises once for each graph, plus the sum's place in the graph.

use std::ffi::c_void;

use cudarc::driver::sys;
use formats::Result;

use super::{CudaBuffer, Gpu, pipeline};

/// The most values of a sum: more are the business of NCCL, which sends each value once.
pub(super) const MOST: usize = 1 << 17;

/// Threads of a block, each of which adds one value.
const THREADS: usize = 256;

/// The store of a word in a mailbox, for the sum and for products that post.
const POST: &str = r#"
typedef unsigned long long word;

__device__ __forceinline__ void post(word* at, word value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(at), "l"(value) : "memory");
}
"#;

/// The results of a product that posts them, as [`tile::emit::cuda_posting`] has them;
/// [`PeerSums::posting`] gives its fields.
const POSTED: &str = r#"
struct tk_post {
    // Where this rank's values go, at each rank; then the rounds before the graph.
    word* boxes[RANKS];
    const volatile unsigned* before;
    // The sum's place in the graph, which `begin` makes the number of the round.
    unsigned round, unused;

    __device__ __forceinline__ void begin() { round += *before; }

    struct Element {
        const tk_post& all;
        unsigned i;
        __device__ __forceinline__ void operator=(float value) const {
            const word sent = ((word)all.round << 32) | __float_as_uint(value);
            const size_t at = (size_t)(all.round & 1) * RANKS * MOST + i;
            #pragma unroll
            for (unsigned to = 0; to < RANKS; to++) post(all.boxes[to] + at, sent);
        }
    };
    __device__ __forceinline__ Element operator[](unsigned i) const { return {*this, i}; }
};
"#;

const SOURCE: &str = r#"
__device__ __forceinline__ word look(const word* at) {
    word value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

#if __CUDA_ARCH__ >= 900
#define NEXT_MAY_START asm volatile("griddepcontrol.launch_dependents;")
#define WAIT_FOR_LAST asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define NEXT_MAY_START
#define WAIT_FOR_LAST
#endif

// The number of rounds before the graph, and the groups of its last sum that have read it.
struct Rounds { unsigned before, read; };

// With `posted`, all values are in the mailboxes, or will be; else this kernel sends its rank's.
extern "C" __global__ void __launch_bounds__(THREADS) peer_sum(
    const float* x, float* y, unsigned count, unsigned rank, unsigned posted, unsigned place,
    unsigned rounds_of_graph, word* const* boxes, Rounds* rounds, const volatile unsigned* stop
) {
    NEXT_MAY_START;
    if (!posted) WAIT_FOR_LAST;
    const unsigned round = *(const volatile unsigned*)&rounds->before + place;
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count) {
        const size_t half = (size_t)(round & 1) * RANKS;
        const float own = posted ? 0.0f : x[i];
        if (!posted) {
            const word sent = ((word)round << 32) | __float_as_uint(own);
            for (unsigned to = 0; to < RANKS; to++) {
                if (to != rank) post(boxes[to] + (half + rank) * MOST + i, sent);
            }
        }
        const word* at = boxes[rank] + half * MOST + i;
        word found[RANKS];
        #pragma unroll
        for (unsigned from = 0; from < RANKS; from++) found[from] = look(at + from * MOST);
        float sum = 0.0f;
        #pragma unroll
        for (unsigned from = 0; from < RANKS; from++) {
            const bool here = !posted && from == rank;
            for (unsigned spins = 1; !here && (unsigned)(found[from] >> 32) != round; spins++) {
                if (spins % 4096 == 0 && *stop == 0) break;
                found[from] = look(at + from * MOST);
            }
            const float value = here ? own : __uint_as_float((unsigned)found[from]);
            sum = from == 0 ? value : sum + value;
        }
        y[i] = sum;
    }
    // The product in front has read all that it reads once all that it posts is here.
    __syncthreads();
    if (rounds_of_graph && threadIdx.x == 0 && atomicAdd(&rounds->read, 1) == gridDim.x - 1) {
        rounds->before += rounds_of_graph;
        rounds->read = 0;
    }
}
"#;

/// The small sums of this process's ranks.
pub(super) struct PeerSums {
    /// Those of this process, of successive ranks.
    own: Vec<Rank>,
    /// The rank of the first of these.
    first: usize,
    /// Number of ranks, in whichever process.
    ranks: usize,
    /// The host's word that ends all waiting of this process once it is 0.
    stop: CudaBuffer,
    /// Mailboxes of other processes.
    _others: Vec<Opened>,
}

/// A sum's place among those of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Its number, from 1.
    pub(super) round: u32,
    /// How many there are, if it is the last; else 0.
    pub(super) rounds_of_graph: u32,
    /// Whether the product in front posts what this rank gives.
    pub(super) posted: bool,
}

impl Place {
    /// The place of a sum by itself.
    pub(super) const ALONE: Place = Place { round: 1, rounds_of_graph: 1, posted: false };
}

/// One rank's part.
struct Rank {
    function: sys::CUfunction,
    /// `[2][ranks][MOST]` words that others write.
    mailbox: CudaBuffer,
    /// The addresses of all ranks' mailboxes, and these on the device.
    addresses: Vec<sys::CUdeviceptr>,
    boxes: CudaBuffer,
    /// The number of rounds before the graph, and the groups of its last sum that have read it.
    rounds: CudaBuffer,
    /// Whether the kernel waits by itself for the one before.
    waits: bool,
}

// SAFETY: a function handle names loaded code and is valid on any thread while its context lives,
// which the buffers ensure.
unsafe impl Send for PeerSums {}
// SAFETY: as above; nothing changes after construction but the memory that buffers refer to.
unsafe impl Sync for PeerSums {}

/// The exchange by which ranks of several processes find each other's mailboxes.
pub(super) trait Exchange {
    /// Every rank's bytes, in rank order.
    ///
    /// # Errors
    /// A rank that does not answer.
    fn gather(&self, own: &[u8; HANDLE]) -> Result<Vec<[u8; HANDLE]>>;

    /// Whether all ranks say yes.
    ///
    /// # Errors
    /// As [`Exchange::gather`].
    fn agree(&self, own: bool) -> Result<bool>;
}

/// Bytes of the driver's name for memory that another process may open.
pub(super) const HANDLE: usize = 64;

/// Memory of another process.
struct Opened {
    gpu: Gpu,
    address: sys::CUdeviceptr,
}

impl Opened {
    fn new(gpu: &Gpu, handle: &[u8; HANDLE]) -> Result<Opened> {
        gpu.0.enter()?;
        let reserved = handle.map(|byte| byte as std::ffi::c_char);
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: writes one address; a handle that names nothing is refused.
        let opened = unsafe {
            sys::cuIpcOpenMemHandle_v2(&mut address, sys::CUipcMemHandle { reserved }, flags)
        };
        gpu.0.check("cuda: memory of another process", opened.result())?;
        Ok(Opened { gpu: gpu.clone(), address })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.gpu.0.enter().is_ok() {
            // SAFETY: opened in this context and closed only here; `Sums` waits for its GPUs
            // before it drops this.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}

impl PeerSums {
    /// For the GPUs of one process in rank order; `None` if some of them do not reach each other's
    /// memory.
    ///
    /// # Errors
    /// Too little memory, or a driver that refuses.
    pub(super) fn new(gpus: &[Gpu]) -> Result<Option<PeerSums>> {
        let reach = |to: &Gpu| gpus.iter().all(|from| to.has_peer(from));
        let Some(one) = gpus.first().filter(|_| gpus.iter().all(reach)) else { return Ok(None) };
        let mailboxes = gpus.iter().map(|gpu| mailbox(gpu, gpus.len()));
        let mailboxes = mailboxes.collect::<Result<Vec<CudaBuffer>>>()?;
        let addresses: Vec<_> = mailboxes.iter().map(CudaBuffer::address).collect();
        let own = gpus.iter().zip(mailboxes);
        let own = own.map(|(gpu, mailbox)| Rank::new(gpu, mailbox, &addresses));
        let (own, ranks) = (own.collect::<Result<_>>()?, gpus.len());
        // The host's memory has one address for all contexts.
        let stop = one.host_buffer(4)?;
        Ok(Some(PeerSums { own, first: 0, ranks, stop, _others: Vec::new() }))
    }

    /// For rank `rank` of `ranks`, whose others are in other processes; `None` if some of them do
    /// not reach each other's memory, as when they run on several machines.
    ///
    /// # Errors
    /// As [`PeerSums::new`], and a rank that does not answer.
    pub(super) fn across(
        gpu: &Gpu,
        rank: usize,
        ranks: usize,
        exchange: &dyn Exchange,
    ) -> Result<Option<PeerSums>> {
        let mailbox = mailbox(gpu, ranks)?;
        let handles = exchange.gather(&handle(gpu, &mailbox).unwrap_or([0; HANDLE]))?;
        let mut others = Vec::new();
        let mut address = |(other, handle): (usize, &[u8; HANDLE])| {
            if other == rank {
                return Ok(mailbox.address());
            }
            let opened = Opened::new(gpu, handle)?;
            let address = opened.address;
            others.push(opened);
            Ok(address)
        };
        let addresses = handles.iter().enumerate().map(&mut address).collect::<Result<Vec<_>>>();
        // A mailbox is freed only once no rank will open it.
        if !exchange.agree(addresses.is_ok())? {
            return Ok(None);
        }
        let own = vec![Rank::new(gpu, mailbox, &addresses?)?];
        let stop = gpu.host_buffer(4)?;
        Ok(Some(PeerSums { own, first: rank, ranks, stop, _others: others }))
    }

    /// The parameter of a product that posts what this process's rank `here` gives to a sum: a
    /// `tk_post`, by words.
    pub(super) fn posting(&self, here: usize, place: Place) -> Vec<u64> {
        let own = &self.own[here];
        let offset = 8 * MOST as u64 * (self.first + here) as u64;
        let boxes = own.addresses.iter().map(|address| address + offset);
        boxes.chain([own.rounds.address(), place.round.into()]).collect()
    }

    /// The definition of a `tk_post`.
    pub(super) fn posted(&self) -> String {
        defines(self.ranks) + POST + POSTED
    }

    /// Enqueues the sum of all ranks' `x`, which goes to every rank's `y`; both have `count` floats,
    /// at most [`MOST`], of this process's rank `here`, and may be the same. With `overlap`, it may
    /// start while the work before it ends.
    ///
    /// # Errors
    /// The driver refuses.
    pub(super) fn enqueue(
        &self,
        here: usize,
        x: &CudaBuffer,
        y: &CudaBuffer,
        count: usize,
        place: Place,
        overlap: bool,
    ) -> Result<()> {
        let own = &self.own[here];
        let context = own.mailbox.context();
        let pointers = [x.address(), y.address(), own.boxes.address(), own.rounds.address()];
        let [count_word, rank] =
            [count, self.first + here].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let numbers =
            [count_word, rank, u32::from(place.posted), place.round, place.rounds_of_graph];
        let stop = self.stop.address();
        let pointer = |i: usize| (&raw const pointers[i]).cast_mut().cast::<c_void>();
        let number = |i: usize| (&raw const numbers[i]).cast_mut().cast::<c_void>();
        let mut parameters = [
            pointer(0),
            pointer(1),
            number(0),
            number(1),
            number(2),
            number(3),
            number(4),
            pointer(2),
            pointer(3),
            (&raw const stop).cast_mut().cast(),
        ];
        let groups = u32::try_from(count.div_ceil(THREADS)).unwrap_or(u32::MAX);
        let (shape, overlap) = ([groups, 1, 1, THREADS as u32, 0], overlap && own.waits);
        // SAFETY: there is a pointer to a word for each of the kernel's parameters. `x` and `y`
        // have `count` floats (`bind` cut them), a mailbox has room for `MOST` words of every rank
        // in both halves, and `rounds` two numbers. A collective keeps all of them alive, and `Sums`
        // frees mailboxes only once the streams of all its GPUs have drained.
        let launched = unsafe {
            pipeline::launch(context, own.function, shape, overlap, parameters.as_mut_ptr())
        }?;
        context.check("cuda: a sum of several GPUs", launched.result())
    }

    /// Ends all waiting, now and later: what is added up has no meaning from then on.
    pub(super) fn stop(&self) {
        // A word of four bytes is inside the buffer, and no other error is possible.
        drop(self.stop.put(0, &[0; 4]));
    }
}

impl Rank {
    fn new(gpu: &Gpu, mailbox: CudaBuffer, addresses: &[sys::CUdeviceptr]) -> Result<Rank> {
        let bytes: Vec<u8> = addresses.iter().flat_map(|at| at.to_le_bytes()).collect();
        Ok(Rank {
            function: gpu.0.function("peer_sum", &source(addresses.len()), "peer_sum")?,
            mailbox,
            addresses: addresses.to_vec(),
            boxes: gpu.upload(&bytes)?,
            rounds: gpu.upload(&[0; 8])?,
            waits: gpu.facts().capability.0 >= 9,
        })
    }
}

/// An empty mailbox of a rank.
fn mailbox(gpu: &Gpu, ranks: usize) -> Result<CudaBuffer> {
    gpu.upload(&vec![0; 8 * 2 * ranks * MOST])
}

/// The driver's name for a buffer by which other processes open it.
fn handle(gpu: &Gpu, of: &CudaBuffer) -> Result<[u8; HANDLE]> {
    gpu.0.enter()?;
    let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE] };
    // SAFETY: writes one handle; the buffer is a whole allocation.
    let got = unsafe { sys::cuIpcGetMemHandle(&mut handle, of.address()) };
    gpu.0.check("cuda: memory for another process", got.result())?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// The kernel's text, for this many ranks.
fn source(ranks: usize) -> String {
    defines(ranks) + POST + SOURCE
}

fn defines(ranks: usize) -> String {
    let all = [("THREADS", THREADS), ("MOST", MOST), ("RANKS", ranks)];
    all.map(|(name, value)| format!("#define {name} {value}\n")).concat()
}

#[cfg(test)]
mod tests {
    use tile::emit;
    use tile::passes::{self, Target};

    use super::*;
    use crate::cuda::Compiler;

    /// Text for GPUs before and since those whose kernels start early.
    fn compiles(text: &str) {
        for capability in [(8, 0), (9, 0)] {
            match Compiler::keeping(capability, None) {
                Ok(compiler) => drop(compiler.image(text).unwrap()),
                Err(why) => testing::skipped(&why),
            }
        }
    }

    #[test]
    fn the_kernel_compiles() {
        compiles(&source(2));
        compiles(&source(8));
    }

    #[test]
    fn products_that_post_compile() {
        let define = defines(2) + POST + POSTED;
        let mut posting = 0;
        for spec in ops::kernels::all() {
            let names = ["linear_add", "gemv", "stream", "moe_down", "moe_combine"];
            if !names.contains(&spec.name) {
                continue;
            }
            for case in (spec.cases)() {
                let special = passes::specialise(&case.kernel, &case.numbers);
                let lowered = passes::lower(&special, Target::Cuda).unwrap();
                let result = |i: &usize| lowered.params[*i].name.starts_with(['y', 'o']);
                let results = (0..lowered.params.len()).filter(result);
                let mut texts =
                    results.filter_map(|i| emit::cuda_posting(&lowered, i, &define).ok());
                if let Some(text) = texts.next() {
                    compiles(&text);
                    posting += 1;
                    break;
                }
            }
        }
        assert_eq!(posting, 5, "every family posts");
    }
}
