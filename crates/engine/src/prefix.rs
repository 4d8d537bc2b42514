//! The prefix tree: cached blocks by what they were computed from.
//!
//! A node is one block: up to 256 [`Item`]s, the kind of step that computed each, and the block of
//! every cache group that is still there. Its path from the root of an adapter is what its keys and
//! values follow from, and is compared item by item, so that no two things with the same tokens are
//! taken for each other. Only full blocks have children. A sequence shares the longest path that it
//! begins with, up to any position inside a block: the pool has it copied if two go on from there.
//!
//! The least recently used leaves go first where blocks are wanted.

use crate::pool::{Block, BlockTable, Copy, first_seen};
use formats::Result;
use program::{BLOCK_TOKENS, Group};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::{Bound, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The content of a position: its token, and the image if the position is an image's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Item {
    token: u32,
    /// A hash of the image that the position's row was computed from; zeros for text.
    image: [u32; 4],
}

/// A sequence as the tree knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key<'a> {
    /// The adapter that its keys and values are computed with; 0: none.
    pub(crate) adapter: u64,
    pub(crate) tokens: &'a [u32],
    /// For each token a hash of the image that its row is computed from, zeros for text; empty
    /// where all are text.
    pub(crate) images: &'a [[u32; 4]],
    /// For each token whether a decode step computes it, and not a prompt step: the two differ in
    /// their last bits.
    pub(crate) decoded: &'a [bool],
}

impl Key<'_> {
    /// The content of a range of its positions.
    fn items(&self, range: Range<usize>) -> Vec<Item> {
        let image = |i: usize| self.images.get(i).copied().unwrap_or_default();
        range.map(|i| Item { token: self.tokens[i], image: image(i) }).collect()
    }
}

/// Why the rest of a sequence was not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Miss {
    /// Nothing is cached that begins with the same tokens.
    Nothing,
    /// The nearest cached sequence has another token, or another image, at this position.
    Differs {
        /// Tokens before it, which are the same.
        position: usize,
        /// The cached token.
        cached: u32,
        /// The token asked for.
        wanted: u32,
    },
    /// The nearest cached sequence ends at this position.
    Ends {
        /// Its length.
        position: usize,
    },
    /// The token at this position was cached by a step of the other kind, and equal bits were asked
    /// for.
    Kind {
        /// Tokens before it.
        position: usize,
    },
    /// The tokens are the same up to this position, but what a layer with a sliding window or a
    /// state needs there is gone.
    Window {
        /// Tokens that are the same.
        position: usize,
    },
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Miss::Nothing => write!(f, "nothing is cached that begins alike"),
            Miss::Differs { position, cached, wanted } if cached == wanted => {
                write!(f, "another image at position {position}")
            }
            Miss::Differs { position, cached, wanted } => {
                write!(f, "token {wanted} at position {position}, cached is {cached}")
            }
            Miss::Ends { position } => write!(f, "what is cached ends at position {position}"),
            Miss::Kind { position } => {
                write!(f, "position {position} was cached by a step of the other kind")
            }
            Miss::Window { position } => {
                write!(f, "alike up to position {position}, whose sliding window or state is gone")
            }
        }
    }
}

/// The longest cached beginning of a sequence.
#[derive(Debug)]
pub(crate) struct Found {
    /// Positions of it.
    pub(crate) len: usize,
    /// Why there are no more; none if all were found that were asked for.
    pub(crate) miss: Option<Miss>,
    /// Its nodes from the root on.
    path: Vec<usize>,
}

/// One block of a path.
#[derive(Debug)]
struct Node {
    parent: Option<usize>,
    items: Arc<[Item]>,
    decoded: Box<[bool]>,
    /// By cache group; none where a window had passed the block.
    blocks: Vec<Option<Block>>,
    children: BTreeMap<Arc<[Item]>, usize>,
    used: u64,
}

/// An engine's tree, for all that take blocks.
#[derive(Debug, Clone)]
pub(crate) struct Prefixes(Arc<Mutex<PrefixTree>>);

impl Prefixes {
    pub(crate) fn new(groups: &[Group]) -> Prefixes {
        Prefixes(Arc::new(Mutex::new(PrefixTree::new(groups))))
    }

    pub(crate) fn tree(&self) -> MutexGuard<'_, PrefixTree> {
        self.0.lock().unwrap_or_else(|poisoned: PoisonError<_>| {
            // A change that was left half-done may give anybody the wrong blocks.
            let mut tree = poisoned.into_inner();
            tree.clear();
            self.0.clear_poison();
            tree
        })
    }

    /// The tree, if its blocks are of this epoch: see `Shared::executor_of`.
    pub(crate) fn tree_of(&self, epoch: u64) -> Option<MutexGuard<'_, PrefixTree>> {
        Some(self.tree()).filter(|tree| tree.epoch == epoch)
    }

    /// Extends a table, giving up what only the tree holds where blocks are wanted.
    ///
    /// # Errors
    /// Too few blocks all the same: nothing has changed then.
    pub(crate) fn extend(
        &self,
        table: &mut BlockTable,
        start: usize,
        end: usize,
        copies: &mut Vec<Copy>,
    ) -> Result<()> {
        loop {
            // One block at a time: what is given up may turn out to have been shared with this
            // table.
            let extended = table.extend(start, end, copies);
            if extended.is_ok() || !self.tree().give_up(table.group()) {
                return extended;
            }
        }
    }
}

/// Cached blocks by what they were computed from.
#[derive(Debug)]
pub(crate) struct PrefixTree {
    groups: Vec<Group>,
    nodes: Vec<Option<Node>>,
    vacant: Vec<usize>,
    roots: HashMap<u64, usize>,
    /// Nodes without children, by their last use; roots are not among them.
    leaves: BTreeSet<(u64, usize)>,
    clock: u64,
    /// The executor that computed its blocks, by the number of those before it.
    epoch: u64,
}

impl PrefixTree {
    /// An empty tree over these cache groups.
    pub(crate) fn new(groups: &[Group]) -> Self {
        PrefixTree {
            groups: groups.to_vec(),
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: HashMap::new(),
            leaves: BTreeSet::new(),
            clock: 0,
            epoch: 0,
        }
    }

    /// The longest beginning of a sequence that is cached, at most `most` positions. With `exact`
    /// each position must have been computed by a step of the same kind, so that nothing tells the
    /// cached bits from computed ones.
    pub(crate) fn find(&mut self, key: &Key<'_>, most: usize, exact: bool) -> Found {
        self.clock += 1;
        let found = self.look(key, most, exact);
        found.path.iter().for_each(|&node| self.touch(node));
        found
    }

    /// [`find`](Self::find) for somebody who only wants to know, and uses nothing of it.
    pub(crate) fn look(&self, key: &Key<'_>, most: usize, exact: bool) -> Found {
        let mut found = Found { len: 0, miss: None, path: Vec::new() };
        let most = most.min(key.tokens.len());
        let mut at = self.roots.get(&key.adapter).copied();
        while let Some(node) = at.filter(|_| found.len < most) {
            let rest = key.items(found.len..most.min(found.len + BLOCK_TOKENS));
            let Some((child, same)) = self.nearest(node, &rest) else { break };
            let Some(Node { items, decoded, .. }) = self.nodes.get(child).and_then(Option::as_ref)
            else {
                break;
            };
            let kinds = decoded[..same].iter().zip(&key.decoded[found.len..]);
            let alike = if exact { kinds.take_while(|(a, b)| a == b).count() } else { same };
            let position = found.len + alike;
            found.miss = if alike < same {
                Some(Miss::Kind { position })
            } else if same < items.len().min(rest.len()) {
                let (cached, wanted) = (items[same].token, rest[same].token);
                Some(Miss::Differs { position, cached, wanted })
            } else {
                None
            };
            let whole = alike == items.len() && alike == BLOCK_TOKENS;
            found.len = position;
            if alike > 0 {
                found.path.push(child);
            }
            at = Some(child).filter(|_| whole);
        }
        if found.len < most && found.miss.is_none() {
            let position = found.len;
            found.miss = Some(if position == 0 { Miss::Nothing } else { Miss::Ends { position } });
        }
        let same = found.len;
        found.len = self.held(&found.path, same);
        if found.len < same {
            found.miss = Some(Miss::Window { position: same });
        }
        found.path.truncate(found.len.div_ceil(BLOCK_TOKENS));
        found
    }

    /// The child that begins with most of `items`, and how many of them.
    fn nearest(&self, node: usize, items: &[Item]) -> Option<(usize, usize)> {
        let children = &self.nodes.get(node)?.as_ref()?.children;
        // In the order of their items, what has most in common with a sequence is beside it.
        let before = children.range::<[Item], _>((Bound::Unbounded, Bound::Included(items)));
        let after = children.range::<[Item], _>((Bound::Excluded(items), Bound::Unbounded));
        let beside = before.rev().take(1).chain(after.take(1));
        let common = |(own, &child): (&Arc<[Item]>, &usize)| {
            (child, own.iter().zip(items).take_while(|(a, b)| a == b).count())
        };
        beside.map(common).max_by_key(|(_, same)| *same)
    }

    /// The longest part of a path from which a sequence can go on: every window's blocks must be
    /// there, and states must be those behind it.
    fn held(&self, path: &[usize], mut len: usize) -> usize {
        let has = |b: usize, group: usize, len: usize| {
            let node = path.get(b).and_then(|&node| self.nodes.get(node)?.as_ref());
            node.is_some_and(|node| {
                let behind = len.min((b + 1) * BLOCK_TOKENS) == b * BLOCK_TOKENS + node.items.len();
                node.blocks[group].is_some() && (behind || !self.groups[group].carried)
            })
        };
        loop {
            let lacking = self.groups.iter().enumerate().filter_map(|(group, kind)| {
                let first = first_seen(kind.window, len) / BLOCK_TOKENS;
                (first..len.div_ceil(BLOCK_TOKENS)).rev().find(|&b| !has(b, group, len))
            });
            // With the last of the lacking blocks the beginning that is left has nothing to do.
            match lacking.min() {
                Some(block) => len = block * BLOCK_TOKENS,
                None => return len,
            }
        }
    }

    /// Fills empty tables, one for each group, with the blocks of a cached prefix.
    pub(crate) fn adopt(&self, found: &Found, tables: &mut [BlockTable]) {
        for (group, table) in tables.iter_mut().enumerate() {
            let first = first_seen(self.groups[group].window, found.len) / BLOCK_TOKENS;
            let nodes = found.path.iter().skip(first);
            let blocks = nodes.filter_map(|&node| self.nodes[node].as_ref()?.blocks[group].clone());
            table.adopt(first, blocks, found.len);
        }
    }

    /// For each position of a cached beginning, whether a decode step computed it.
    pub(crate) fn decoded(&self, found: &Found) -> impl Iterator<Item = bool> {
        let nodes = found.path.iter().filter_map(|&node| self.nodes[node].as_ref());
        nodes.flat_map(|node| node.decoded.iter().copied()).take(found.len)
    }

    /// Keeps what tables hold of a sequence's items.
    pub(crate) fn insert(&mut self, key: &Key<'_>, tables: &[BlockTable]) {
        self.clock += 1;
        let mut at = match self.roots.get(&key.adapter) {
            Some(&root) => root,
            None => {
                let root = self.add(None, &[], &[], Vec::new());
                self.roots.insert(key.adapter, root);
                root
            }
        };
        let len = key.decoded.len();
        for (b, decoded) in key.decoded.chunks(BLOCK_TOKENS).enumerate() {
            let items = &key.items(b * BLOCK_TOKENS..b * BLOCK_TOKENS + decoded.len())[..];
            let blocks = || tables.iter().map(|table| table.share(b, len)).collect();
            let near = self.nearest(at, items).filter(|(_, same)| *same > 0);
            let Some((child, same)) = near else {
                at = self.add(Some(at), items, decoded, blocks());
                continue;
            };
            let Some(node) = self.nodes.get_mut(child).and_then(Option::as_mut) else { return };
            let held = node.items.len();
            if same < held.min(items.len()) {
                at = self.add(Some(at), items, decoded, blocks());
                continue;
            }
            // Later blocks of the sequence were computed from its own rows. This node's rows are of
            // another kind and have other bits, so that those blocks cannot follow it.
            if node.decoded[..same] != decoded[..same] {
                return;
            }
            if held < items.len() {
                // The block has grown: the longer one takes the place of the shorter.
                self.remove(child);
                at = self.add(Some(at), items, decoded, blocks());
                continue;
            }
            if held == items.len() {
                let missing = node.blocks.iter_mut().zip(tables).filter(|(own, _)| own.is_none());
                missing.for_each(|(own, table)| *own = table.share(b, len));
            }
            self.touch(child);
            at = child;
        }
    }

    fn add(
        &mut self,
        parent: Option<usize>,
        items: &[Item],
        decoded: &[bool],
        blocks: Vec<Option<Block>>,
    ) -> usize {
        let items: Arc<[Item]> = items.into();
        let node = Node {
            parent,
            items: items.clone(),
            decoded: decoded.into(),
            blocks,
            children: BTreeMap::new(),
            used: self.clock,
        };
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.nodes.len() - 1
        });
        self.nodes[id] = Some(node);
        if let Some(parent) = parent
            && let Some(node) = self.nodes[parent].as_mut()
        {
            node.children.insert(items, id);
            self.leaves.remove(&(node.used, parent));
            self.leaves.insert((self.clock, id));
        }
        id
    }

    /// Takes a leaf away.
    fn remove(&mut self, id: usize) {
        let Some(node) = self.nodes[id].take() else { return };
        self.vacant.push(id);
        self.leaves.remove(&(node.used, id));
        let Some(above) = node.parent else { return };
        if let Some(parent) = self.nodes[above].as_mut() {
            parent.children.remove(&node.items);
            if parent.children.is_empty() && parent.parent.is_some() {
                self.leaves.insert((parent.used, above));
            }
        }
    }

    fn touch(&mut self, id: usize) {
        let Some(node) = self.nodes[id].as_mut() else { return };
        let (before, now) = (node.used, self.clock);
        node.used = now;
        if self.leaves.remove(&(before, id)) {
            self.leaves.insert((now, id));
        }
    }

    /// Gives up a leaf, the least recently used of those that free a block of a group; false if the
    /// tree is empty. A state goes without its leaf, and wherever it is: what it follows from
    /// stays.
    pub(crate) fn give_up(&mut self, group: usize) -> bool {
        if self.groups[group].carried {
            let states = self.nodes.iter_mut().flatten();
            let sole = |node: &&mut Node| {
                node.blocks
                    .get(group)
                    .is_some_and(|block| block.as_ref().is_some_and(Block::is_sole))
            };
            let least = states.filter(sole).min_by_key(|node| node.used);
            if let Some(node) = least {
                node.blocks[group] = None;
                return true;
            }
        }
        // A block that a table holds too is not freed by dropping it here: such leaves go only if
        // there are no others.
        let frees = |id: usize| {
            let node = self.nodes[id].as_ref();
            node.and_then(|node| node.blocks[group].as_ref()).is_some_and(Block::is_sole)
        };
        let mut leaves = self.leaves.iter().map(|(_, id)| *id);
        let Some(least) = leaves.clone().next() else { return false };
        let victim = leaves.find(|&id| frees(id)).unwrap_or(least);
        self.remove(victim);
        true
    }

    /// Blocks of a group that only the tree holds.
    pub(crate) fn evictable(&self, group: usize) -> usize {
        let blocks =
            self.nodes.iter().flatten().filter_map(|node| node.blocks.get(group)?.as_ref());
        blocks.filter(|block| block.is_sole()).count()
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        let PrefixTree { clock, epoch, .. } = *self;
        *self = PrefixTree { clock, epoch, ..PrefixTree::new(&self.groups) };
    }

    /// Forgets everything, and takes only blocks of another executor from now on.
    pub(crate) fn renew(&mut self, epoch: u64) {
        self.clear();
        self.epoch = epoch;
    }
}

#[cfg(test)]
mod tests;
