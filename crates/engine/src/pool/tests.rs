//! Tables against a memory that notes what was written where.

use super::*;
use ops::sample::philox::bits;

fn table(pool: &Pool, window: Option<usize>, context: usize, chunk: usize) -> BlockTable {
    BlockTable::new(pool, 0, window, context, chunk)
}

/// Extends a table that shares nothing, in chunks.
fn grow(table: &mut BlockTable, start: usize, end: usize, chunk: usize) {
    let mut copies = Vec::new();
    for from in (start..end).step_by(chunk) {
        table.extend(from, (from + chunk).min(end), &mut copies).unwrap();
    }
    assert!(copies.is_empty());
}

#[test]
fn a_growing_table_returns_what_it_drops() {
    let pool = Pool::new(&[8]);
    let mut one = table(&pool, None, 4096, 512);
    grow(&mut one, 0, 1000, 512);
    assert_eq!(one.table().blocks, [0, 1, 2, 3]);
    assert!(one.can_return_to(0) && one.can_return_to(999));
    one.truncate(300);
    assert_eq!(one.table().blocks, [0, 1]);
    let mut other = table(&pool, None, 4096, 512);
    grow(&mut other, 0, 600, 512);
    assert_eq!(other.table().blocks, [2, 3, 4]);
    assert_eq!((pool.free(0), pool.limit(0)), (3, 8));
    let error = other.extend(600, 4096, &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("at most 8 blocks"), "{error}");
    assert_eq!((other.table().blocks.len(), pool.free(0)), (3, 3), "nothing has changed");
    drop((one, other));
    assert_eq!(pool.free(0), 8);
}

#[test]
fn a_window_drops_its_oldest_block_and_forgets() {
    let pool = Pool::new(&[8]);
    let mut ring = table(&pool, Some(300), 1 << 20, 128);
    grow(&mut ring, 0, 10_000, 128);
    assert_eq!(ring.table().blocks.len(), 3);
    assert_eq!(ring.table().oldest, (10_000u32.div_ceil(256) - 3) * 256);
    assert!(ring.can_return_to(9_999) && !ring.can_return_to(9_000));
    ring.truncate(9_999);
    assert_eq!((ring.table().blocks.len(), pool.free(0)), (3, 5));
    let error = ring.extend(9_999, 12_000, &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("at most 3 blocks at a time"), "{error}");
    ring.truncate(0);
    assert!(ring.table().blocks.is_empty() && ring.can_return_to(0));
    assert_eq!(pool.free(0), 8);
}

#[test]
fn a_full_pool_is_enough_for_a_window_that_moves() {
    let pool = Pool::new(&[3]);
    let mut ring = table(&pool, Some(300), 1 << 20, 128);
    grow(&mut ring, 0, 5000, 128);
    assert_eq!(pool.free(0), 0);
}

#[test]
fn who_goes_on_in_a_shared_block_copies_what_is_shared() {
    let pool = Pool::new(&[8]);
    let mut copies = Vec::new();
    let mut one = table(&pool, None, 4096, 512);
    grow(&mut one, 0, 300, 512);
    let (mut two, mut three) = (one.fork(300), one.fork(100));
    assert_eq!(pool.free(0), 6);
    assert_eq!((two.needs(300, 310), two.needs(300, 600)), (1, 2), "a copy, and a block");
    two.extend(300, 310, &mut copies).unwrap();
    assert_eq!((two.needs(310, 512), two.needs(310, 513)), (0, 1), "it goes on in its own");
    let [Copy { to: 2, from, .. }] = &copies[..] else { panic!("{copies:?}") };
    assert_eq!((from.number(), two.table().blocks), (1, &[0, 2][..]));
    copies.clear();
    one.extend(300, 301, &mut copies).unwrap();
    assert!(copies.is_empty() && one.table().blocks == [0, 1], "the last that has it keeps it");
    three.extend(100, 101, &mut copies).unwrap();
    let [Copy { to: 3, .. }] = &copies[..] else { panic!("{copies:?}") };
    // Beside the prefix tree a table goes on where it wrote last, also where it had claimed more
    // than it then wrote.
    copies.clear();
    let shared = two.share(1, two.reached).unwrap();
    two.extend(305, 306, &mut copies).unwrap();
    assert!(copies.is_empty() && !shared.is_sole());
    // But not before that: the tree may read it.
    two.truncate(300);
    two.extend(300, 301, &mut copies).unwrap();
    assert_eq!(copies.len(), 1);
    copies.clear();
    drop((one, two, three, shared));
    assert_eq!(pool.free(0), 8);
}

/// A sequence as the test knows it: what each of its positions was written with.
struct Sequence {
    table: BlockTable,
    content: Vec<u64>,
}

/// The contents of blocks.
type Memory = Vec<[u64; BLOCK_TOKENS]>;

impl Sequence {
    fn write(&mut self, memory: &mut Memory, ahead: usize, values: &[u64]) {
        let (start, mut copies) = (self.content.len(), Vec::new());
        let end = start + values.len();
        if self.table.extend(start, end + ahead, &mut copies).is_err() {
            return assert!(copies.is_empty());
        }
        for copy in &copies {
            let from = memory[copy.from.number() as usize];
            memory[copy.to as usize] = [u64::MAX; BLOCK_TOKENS];
            memory[copy.to as usize].copy_from_slice(&from);
        }
        for (p, &value) in (start..).zip(values) {
            let Table { blocks, .. } = self.table.table();
            memory[blocks[p / BLOCK_TOKENS % blocks.len()] as usize][p % BLOCK_TOKENS] = value;
            self.content.push(value);
        }
        // What was claimed ahead is written too, with what nobody shall read.
        for p in end..end + ahead {
            let Table { blocks, .. } = self.table.table();
            memory[blocks[p / BLOCK_TOKENS % blocks.len()] as usize][p % BLOCK_TOKENS] = u64::MAX;
        }
    }

    fn check(&self, memory: &Memory) {
        let Table { blocks, oldest } = self.table.table();
        let first = first_seen(self.table.window(), self.content.len());
        assert!(self.content.is_empty() || oldest as usize <= first);
        let held: Vec<u32> = self.table.held.clone().map(|b| self.table.entry(b)).collect();
        assert!(blocks.iter().all(|block| held.contains(block)), "{blocks:?}, held {held:?}");
        for p in oldest as usize..self.content.len() {
            let block = blocks[p / BLOCK_TOKENS % blocks.len()] as usize;
            assert_eq!(memory[block][p % BLOCK_TOKENS], self.content[p], "position {p}");
        }
    }
}

#[test]
fn whatever_is_shared_each_reads_what_it_wrote() {
    const LIMIT: usize = 40;
    for (seed, window) in [(1, None), (2, Some(300)), (3, Some(40)), (4, Some(1)), (5, None)] {
        let pool = Pool::new(&[LIMIT]);
        let mut memory: Memory = vec![[0; BLOCK_TOKENS]; LIMIT];
        let new = || Sequence { table: table(&pool, window, 2048, 300), content: Vec::new() };
        let mut all: Vec<Sequence> = (0..4).map(|_| new()).collect();
        let mut kept: Vec<(Block, usize, u64)> = Vec::new();
        for at in 0..20_000u64 {
            let random = bits(seed, at);
            let i = (random >> 8) as usize % all.len();
            let len = all[i].content.len();
            let pick = (random >> 32) as usize;
            match random % 16 {
                0..=8 => {
                    let ahead = if random & 1 << 20 == 0 { 0 } else { 2.min(2048 - len) };
                    let rows = (1 + pick % 300).min(2048 - len - ahead);
                    let values: Vec<u64> = (0..rows as u64).map(|r| at << 16 | r).collect();
                    if rows > 0 {
                        let end = len + rows + ahead;
                        let (needs, free) = (all[i].table.needs(len, end), pool.free(0));
                        all[i].write(&mut memory, ahead, &values);
                        let taken = free.saturating_sub(pool.free(0));
                        assert!(taken <= needs || window.is_some(), "{taken} of {needs}");
                    }
                }
                9..=11 => {
                    let end = pick % (len + 1);
                    if all[i].table.can_return_to(end) {
                        all[i].table.truncate(end);
                        all[i].content.truncate(end);
                    }
                }
                12..=13 if all.len() < 12 && all[i].table.can_return_to(pick % (len + 1)) => {
                    let end = pick % (len + 1);
                    let content = all[i].content[..end].to_vec();
                    let fork = Sequence { table: all[i].table.fork(end), content };
                    all.push(fork);
                }
                14 if all.len() > 1 => drop(all.swap_remove(i)),
                // Somebody else keeps a block up to some position, as the prefix tree does; or
                // adopts what is there.
                _ if random & 1 << 21 == 0 && len > 0 => {
                    let p = pick % len;
                    if let Some(block) = all[i].table.share(p / BLOCK_TOKENS, all[i].table.reached)
                    {
                        kept.push((block, p % BLOCK_TOKENS, all[i].content[p]));
                    }
                }
                _ if len > 0 => {
                    let end = pick % len;
                    let first = first_seen(window, end) / BLOCK_TOKENS;
                    let last = end.div_ceil(BLOCK_TOKENS);
                    let found: Option<Vec<Block>> = (first..last.max(first))
                        .map(|b| all[i].table.share(b, all[i].table.reached))
                        .collect();
                    if let Some(found) = found {
                        let mut other = new();
                        other.table.adopt(first, found.into_iter(), end);
                        other.content = all[i].content[..end].to_vec();
                        let replaced = pick % all.len();
                        all[replaced] = other;
                    }
                }
                _ => {}
            }
            if kept.len() > 6 {
                kept.swap_remove(pick % kept.len());
            }
            all.iter().for_each(|sequence| sequence.check(&memory));
            for (block, offset, value) in &kept {
                assert_eq!(memory[block.number() as usize][*offset], *value, "kept");
            }
        }
        drop((all, kept));
        assert_eq!(pool.free(0), LIMIT, "blocks in = blocks out");
    }
}

/// Where a table that carries a state goes back to, and whose states those are.
#[test]
fn states_are_kept_at_multiples_and_where_asked() {
    let pool = Pool::new(&[8]);
    let carried = Group { window: Some(2), carried: true };
    let new = || BlockTable::new(&pool, 0, carried, 4096, 128);
    let mut one = new();
    grow(&mut one, 0, 700, 128);
    let last = one.number(2).unwrap();
    assert_eq!([700, 699, 600, 511].map(|end| one.returns_to(end)), [700, 512, 512, 0]);
    one.keep();
    let mut copies = Vec::new();
    one.extend(700, 701, &mut copies).unwrap();
    let [copy] = &copies[..] else { panic!("one copy: {copies:?}") };
    assert_eq!((copy.from.number(), Some(copy.to)), (last, one.number(2)));
    assert_ne!(copy.to, last, "the kept state is not written over");
    copies.clear();
    assert_eq!([701, 700, 699].map(|end| one.returns_to(end)), [701, 700, 512]);
    // Others share a state where it is the one behind their positions.
    assert!(one.share(2, 700).is_none() && one.share(2, 701).is_some());
    assert!(one.share(1, 700).is_some());
    let mut fork = one.fork(700);
    assert_eq!((fork.number(2), fork.returns_to(700)), (Some(last), 700));
    fork.extend(700, 705, &mut copies).unwrap();
    assert_eq!(copies.len(), 1, "a state that others hold is copied");
    copies.clear();
    one.truncate(700);
    assert_eq!((one.number(2), one.returns_to(700)), (Some(last), 700));
    one.truncate(512);
    assert_eq!((one.returns_to(512), one.number(2)), (512, None));
    one.extend(512, 520, &mut copies).unwrap();
    assert!(copies.is_empty(), "a block that nothing is taken up from");
    // What was claimed and not computed is taken back.
    one.extend(520, 640, &mut copies).unwrap();
    one.disclaim(520);
    assert_eq!(one.returns_to(520), 520);
    drop((one, fork));
    assert_eq!(pool.free(0), 8);
}

#[test]
fn kept_states_make_room() {
    let carried = Group { window: Some(2), carried: true };
    assert_eq!(most(carried, 4096, 128), 4);
    let pool = Pool::new(&[2]);
    let mut table = BlockTable::new(&pool, 0, carried, 4096, 128);
    grow(&mut table, 0, 300, 128);
    table.keep();
    // A copy of the kept state's block, and the next block, which there is no room for beside it.
    table.extend(300, 520, &mut Vec::new()).unwrap();
    assert_eq!((table.returns_to(519), table.returns_to(511)), (512, 0));
}
