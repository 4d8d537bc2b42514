//! Prefixes that are found again, those that are not and why, and those that go first.

use super::*;
use crate::pool::Pool;
use ops::sample::philox::bits;

const CHUNK: usize = 512;

struct Fixture {
    pool: Pool,
    tree: PrefixTree,
    windows: Vec<Option<usize>>,
}

/// A sequence: items, the kinds of step that computed them, and tables that hold them.
struct Sequence {
    adapter: u64,
    tokens: Vec<u32>,
    images: Vec<[u32; 4]>,
    decoded: Vec<bool>,
    tables: Vec<BlockTable>,
}

impl Sequence {
    fn key(&self) -> Key<'_> {
        Key {
            adapter: self.adapter,
            tokens: &self.tokens,
            images: &self.images,
            decoded: &self.decoded,
        }
    }
}

impl Fixture {
    fn new(windows: &[Option<usize>], blocks: usize) -> Fixture {
        let pool = Pool::new(&vec![blocks; windows.len()]);
        let groups: Vec<Group> = windows.iter().map(|window| Group::from(*window)).collect();
        Fixture { pool, tree: PrefixTree::new(&groups), windows: windows.to_vec() }
    }

    fn tables(&self) -> Vec<BlockTable> {
        let table =
            |(g, w): (usize, &Option<usize>)| BlockTable::new(&self.pool, g, *w, 8192, CHUNK);
        self.windows.iter().enumerate().map(table).collect()
    }

    /// A sequence of these tokens, the last `decoded` of which were generated.
    fn sequence(&self, tokens: impl IntoIterator<Item = u32>, decoded: usize) -> Sequence {
        let tokens: Vec<u32> = tokens.into_iter().collect();
        let mut tables = self.tables();
        for start in (0..tokens.len()).step_by(CHUNK) {
            let end = (start + CHUNK).min(tokens.len());
            tables.iter_mut().for_each(|t| t.extend(start, end, &mut Vec::new()).unwrap());
        }
        let prompt = tokens.len() - decoded;
        let decoded = (0..tokens.len()).map(|i| i >= prompt).collect();
        Sequence { adapter: 0, tokens, images: Vec::new(), decoded, tables }
    }

    fn keep(&mut self, sequence: &Sequence) {
        self.tree.insert(&sequence.key(), &sequence.tables);
    }

    /// How much of these tokens is found, as tokens of a prompt.
    fn find(&mut self, tokens: impl IntoIterator<Item = u32>, exact: bool) -> Found {
        let tokens: Vec<u32> = tokens.into_iter().collect();
        let decoded = vec![false; tokens.len()];
        let key = Key { adapter: 0, tokens: &tokens, images: &[], decoded: &decoded };
        self.tree.find(&key, tokens.len(), exact)
    }
}

#[test]
fn the_longest_beginning_is_found_and_why_no_more_is_said() {
    let mut f = Fixture::new(&[None], 64);
    let long = f.sequence(0..1000, 0);
    f.keep(&long);
    let other = f.sequence((0..600).chain([9000, 9001]), 0);
    f.keep(&other);
    let differs = |position, cached, wanted| Some(Miss::Differs { position, cached, wanted });
    let then = |n: u32, rest: &[u32]| (0..n).chain(rest.iter().copied()).collect::<Vec<u32>>();
    for (tokens, len, miss) in [
        (then(1000, &[]), 1000, None),
        (then(1200, &[]), 1000, Some(Miss::Ends { position: 1000 })),
        (then(300, &[]), 300, None),
        (then(300, &[7, 8]), 300, differs(300, 300, 7)),
        (then(600, &[9000, 1]), 601, differs(601, 9001, 1)),
        (then(700, &[9]), 700, differs(700, 700, 9)),
        (vec![5, 6], 0, differs(0, 0, 5)),
    ] {
        let found = f.find(tokens, false);
        assert_eq!((found.len, found.miss), (len, miss));
        let mut tables = f.tables();
        f.tree.adopt(&found, &mut tables);
        let blocks = len.div_ceil(BLOCK_TOKENS);
        assert_eq!(tables[0].table().blocks.len(), blocks);
    }
    assert_eq!(
        f.find(600..603, false).miss.unwrap().to_string(),
        "token 600 at position 0, cached is 0"
    );
    drop((long, other));
    assert_eq!(f.tree.evictable(0), 4 + 1);
    f.tree.clear();
    assert_eq!(f.pool.free(0), 64);
    assert_eq!(f.find(0..5, false).miss, Some(Miss::Nothing));
}

#[test]
fn adapters_images_and_kinds_of_steps_tell_sequences_apart() {
    let mut f = Fixture::new(&[None], 64);
    let mut first = f.sequence(0..400, 100);
    first.images = vec![[0; 4]; 400];
    first.images[10] = [1, 2, 3, 4];
    f.keep(&first);
    let find = |f: &mut Fixture, key: &Key<'_>, exact| f.tree.find(key, 400, exact);
    assert_eq!(find(&mut f, &Key { adapter: 1, ..first.key() }, false).miss, Some(Miss::Nothing));
    assert_eq!(find(&mut f, &first.key(), true).len, 400);
    let mut images = first.images.clone();
    images[10] = [1, 2, 3, 5];
    let found = find(&mut f, &Key { images: &images, ..first.key() }, false);
    assert_eq!(found.len, 10);
    assert_eq!(found.miss.unwrap().to_string(), "another image at position 10");
    // A prompt that has what was generated reuses it, unless it wants the bits of a prompt.
    let prompt = vec![false; 400];
    let key = Key { decoded: &prompt, ..first.key() };
    assert_eq!(find(&mut f, &key, false).len, 400);
    let found = find(&mut f, &key, true);
    assert_eq!((found.len, found.miss), (300, Some(Miss::Kind { position: 300 })));
    // What goes on from other bits is not put behind these.
    let mut second = f.sequence(0..700, 0);
    second.images = [&first.images[..], &[[0; 4]; 300]].concat();
    f.keep(&second);
    let found = find(&mut f, &second.key(), false);
    assert_eq!(found.len, 400);
}

#[test]
fn what_grows_takes_the_place_of_what_it_was() {
    let mut f = Fixture::new(&[None], 64);
    let mut one = f.sequence(0..100, 0);
    f.keep(&one);
    one.tables[0].extend(100, 300, &mut Vec::new()).unwrap();
    one.tokens.extend(100..300);
    one.decoded.extend([true; 200]);
    f.keep(&one);
    f.keep(&one);
    let shorter = f.sequence(0..50, 0);
    f.keep(&shorter);
    assert_eq!(f.find(0..300, false).len, 300);
    assert_eq!(f.tree.nodes.iter().flatten().count(), 3, "a root and two blocks");
    assert_eq!(f.tree.leaves.len(), 1);
}

#[test]
fn a_window_is_found_where_its_blocks_still_are() {
    let mut f = Fixture::new(&[None, Some(300)], 64);
    let long = f.sequence(0..3000, 0);
    f.keep(&long);
    // Only the end is left of the window's group.
    let found = f.find(0..3000, false);
    assert_eq!((found.len, found.miss), (3000, None));
    let mut tables = f.tables();
    f.tree.adopt(&found, &mut tables);
    assert_eq!(tables[0].table().oldest, 0);
    assert_eq!(tables[1].table().oldest, (2701 / 256) * 256);
    assert!(tables[1].can_return_to(3000));
    let found = f.find(0..2000, false);
    assert_eq!((found.len, found.miss), (0, Some(Miss::Window { position: 2000 })));
    // A sequence that comes by leaves the blocks that were missing.
    let short = f.sequence(0..512, 0);
    f.keep(&short);
    assert_eq!(f.find(0..512, false).len, 512);
    let found = f.find(0..2000, false);
    assert_eq!((found.len, found.miss), (512, Some(Miss::Window { position: 2000 })));
}

/// Gives up leaves until `blocks` blocks are free.
fn room(f: &mut Fixture, blocks: usize) {
    while f.pool.free(0) < blocks {
        assert!(f.tree.give_up(0));
    }
}

#[test]
fn the_least_recently_used_leaves_go_first() {
    let mut f = Fixture::new(&[None], 8);
    for first in [1000, 2000, 3000] {
        let sequence = f.sequence(first..first + 512, 0);
        f.keep(&sequence);
    }
    assert_eq!((f.pool.free(0), f.tree.evictable(0)), (2, 6));
    assert_eq!(f.find(1000..1512, false).len, 512);
    room(&mut f, 4);
    assert_eq!(f.find(2000..2512, false).len, 0);
    assert_eq!(f.find(3000..3512, false).len, 512);
    // What a running sequence shares is left for last: to give it up frees nothing.
    let found = f.find(1000..1512, false);
    let mut tables = f.tables();
    f.tree.adopt(&found, &mut tables);
    f.find(3000..3512, false);
    assert_eq!(f.tree.evictable(0), 2);
    room(&mut f, 6);
    assert_eq!(f.find(1000..1512, false).len, 512);
    assert_eq!(f.find(3000..3512, false).len, 0);
    while f.tree.give_up(0) {}
    assert_eq!(f.pool.free(0), 6, "the rest is in use");
    drop(tables);
    assert_eq!(f.pool.free(0), 8);
}

#[test]
fn whatever_comes_the_tree_finds_what_a_list_finds() {
    let mut f = Fixture::new(&[None], 4096);
    let mut kept: Vec<Vec<u32>> = Vec::new();
    for at in 0..400 {
        let random = |salt: u64| bits(at, salt) as usize;
        // Beginnings of one another, with few different tokens.
        let mut tokens: Vec<u32> = match random(0) % 4 {
            0 if !kept.is_empty() => {
                let old = &kept[random(1) % kept.len()];
                old[..random(2) % (old.len() + 1)].to_vec()
            }
            _ => Vec::new(),
        };
        tokens.extend((0..random(3) % 600).map(|i| bits(at, 10 + i as u64) as u32 % 2));
        let common = |old: &Vec<u32>| old.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let longest = kept.iter().map(common).max().unwrap_or(0);
        assert_eq!(f.find(tokens.iter().copied(), true).len, longest);
        let sequence = f.sequence(tokens.iter().copied(), 0);
        f.keep(&sequence);
        kept.push(tokens);
    }
    let leaves = |f: &Fixture| {
        let leaf = |node: &&Node| node.children.is_empty() && node.parent.is_some();
        f.tree.nodes.iter().flatten().filter(leaf).count()
    };
    assert_eq!(f.tree.leaves.len(), leaves(&f));
    room(&mut f, 4096);
    assert_eq!(f.tree.nodes.iter().flatten().count(), 1, "the root");
}

/// States are those behind whole blocks and behind sequences, and go first without what they follow
/// from.
#[test]
fn states_are_found_where_they_were_kept() {
    let carried = Group { window: Some(2), carried: true };
    let pool = Pool::new(&[64, 64]);
    let mut tree = PrefixTree::new(&[None.into(), carried]);
    let tokens: Vec<u32> = (0..1000).collect();
    let decoded = vec![false; 1000];
    let key = |tokens, decoded| Key { adapter: 0, tokens, images: &[], decoded };
    let mut tables: Vec<BlockTable> = [Group::from(None), carried]
        .iter()
        .enumerate()
        .map(|(group, kind)| BlockTable::new(&pool, group, *kind, 8192, CHUNK))
        .collect();
    for start in (0..1000).step_by(250) {
        tables.iter_mut().for_each(|t| t.extend(start, start + 250, &mut vec![]).unwrap());
    }
    tree.insert(&key(&tokens, &decoded), &tables);
    let find = |tree: &mut PrefixTree, len: usize| {
        let found = tree.find(&key(&tokens[..len], &decoded[..len]), len, true);
        (found.len, found.miss.is_some())
    };
    for (len, expected, why) in [
        (1000, (1000, false), "all of it"),
        (999, (768, true), "a state that went on"),
        (768, (768, false), "a whole block"),
        (700, (512, true), "within a block"),
        (100, (0, true), "before the first state"),
    ] {
        assert_eq!(find(&mut tree, len), expected, "{why}");
    }
    drop(tables);
    let free = pool.free(0);
    while tree.evictable(1) > 0 {
        assert!(tree.give_up(1));
    }
    assert_eq!((pool.free(0), pool.free(1)), (free, 64), "keys and values stay");
    assert_eq!(find(&mut tree, 1000), (0, true));
}
