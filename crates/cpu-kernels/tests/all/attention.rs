//! Attention against the definition in f64, on every instruction set, element type and number of
//! workers.

use delft_cpu_kernels::attention::*;
use delft_cpu_kernels::isa::Isa;
use delft_cpu_kernels::team::{SharedSlice, Team};
use formats::{CacheType, DType};
use half::{bf16, f16};

/// Deterministic numbers in -1..1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    fn many(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    block_tokens: usize,
    /// Blocks of a session's table: the ring wraps when positions exceed them.
    ring: usize,
    /// (first position, tokens) of each sequence's queries.
    sequences: &'static [(usize, usize)],
    window: Option<usize>,
    chunked: bool,
    softcap: Option<f32>,
    sinks: bool,
    slopes: bool,
    /// Positions that are chosen for each query; 0: all are seen.
    chosen: usize,
    why: &'static str,
}

const PLAIN: Case = Case {
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    block_tokens: 64,
    ring: 8,
    sequences: &[(0, 1)],
    window: None,
    chunked: false,
    softcap: None,
    sinks: false,
    slopes: false,
    chosen: 0,
    why: "one key",
};

const CASES: &[Case] = &[
    PLAIN,
    Case { sequences: &[(130, 1)], why: "decode in a third block", ..PLAIN },
    Case { sequences: &[(0, 100)], why: "prefill from nothing", ..PLAIN },
    Case { sequences: &[(63, 2)], why: "two queries at a block's edge", ..PLAIN },
    Case {
        sequences: &[(0, 17), (40, 1), (255, 1), (256, 1), (3, 0), (100, 30)],
        why: "a mixed batch",
        ..PLAIN
    },
    Case { heads: 7, kv_heads: 1, sequences: &[(200, 1), (10, 33)], why: "7 to 1", ..PLAIN },
    Case { heads: 9, kv_heads: 3, sequences: &[(200, 1), (10, 33)], why: "3 to 1", ..PLAIN },
    Case {
        heads: 14,
        kv_heads: 2,
        head_dim: 80,
        sequences: &[(300, 1), (10, 33)],
        why: "80",
        ..PLAIN
    },
    Case {
        heads: 3,
        kv_heads: 3,
        head_dim: 12,
        sequences: &[(77, 1), (0, 50)],
        why: "12",
        ..PLAIN
    },
    Case {
        heads: 2,
        kv_heads: 1,
        head_dim: 24,
        block_tokens: 16,
        sequences: &[(77, 1), (0, 50)],
        why: "24",
        ..PLAIN
    },
    Case {
        heads: 2,
        kv_heads: 2,
        head_dim: 7,
        block_tokens: 16,
        sequences: &[(20, 1), (0, 20)],
        why: "7",
        ..PLAIN
    },
    Case {
        heads: 8,
        kv_heads: 2,
        head_dim: 96,
        sequences: &[(90, 1), (90, 20)],
        why: "96",
        ..PLAIN
    },
    Case {
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        block_tokens: 256,
        sequences: &[(700, 1), (400, 60)],
        why: "Qwen3",
        ..PLAIN
    },
    Case {
        heads: 4,
        kv_heads: 1,
        head_dim: 256,
        sequences: &[(300, 1), (5, 40)],
        why: "Gemma 3",
        ..PLAIN
    },
    Case {
        heads: 71,
        kv_heads: 1,
        head_dim: 64,
        sequences: &[(30, 1), (5, 9)],
        why: "Falcon",
        ..PLAIN
    },
    Case {
        heads: 16,
        kv_heads: 1,
        head_dim: 576,
        sequences: &[(200, 1)],
        why: "DeepSeek's latents, whose heads workers split",
        ..PLAIN
    },
    Case {
        heads: 12,
        kv_heads: 1,
        head_dim: 576,
        sequences: &[(300, 1), (5, 30)],
        why: "latents of several sequences",
        ..PLAIN
    },
    Case { window: Some(1), sequences: &[(99, 1), (60, 10)], why: "a window of one", ..PLAIN },
    Case {
        window: Some(50),
        sequences: &[(49, 1), (50, 1), (51, 1), (300, 1), (20, 90)],
        why: "windows",
        ..PLAIN
    },
    Case {
        window: Some(300),
        sequences: &[(511, 1), (350, 100)],
        why: "a window over two chunks",
        ..PLAIN
    },
    Case {
        window: Some(50),
        chunked: true,
        sequences: &[(49, 1), (50, 1), (99, 1), (310, 1), (20, 190)],
        why: "chunks",
        ..PLAIN
    },
    Case {
        ring: 3,
        window: Some(120),
        sequences: &[(1000, 1), (640, 50)],
        why: "a wrapped ring with a window",
        ..PLAIN
    },
    Case {
        ring: 3,
        block_tokens: 16,
        sequences: &[(1000, 1), (640, 10)],
        why: "a wrapped ring, bounded by `oldest`",
        ..PLAIN
    },
    Case { softcap: Some(2.0), sequences: &[(300, 1), (0, 70)], why: "softcap", ..PLAIN },
    Case { sinks: true, sequences: &[(0, 1), (300, 1), (0, 70)], why: "sinks", ..PLAIN },
    Case { slopes: true, sequences: &[(0, 1), (300, 1), (0, 70)], why: "slopes", ..PLAIN },
    Case {
        slopes: true,
        heads: 3,
        kv_heads: 3,
        sequences: &[(200, 150)],
        why: "slopes over several tiles",
        ..PLAIN
    },
    Case {
        chosen: 5,
        sequences: &[(3, 1), (700, 1), (0, 70), (290, 40)],
        ring: 16,
        why: "few positions chosen: tiles and chunks of none",
        ..PLAIN
    },
    Case {
        chosen: 90,
        sinks: true,
        softcap: Some(2.0),
        window: Some(150),
        sequences: &[(300, 1), (100, 90)],
        why: "positions chosen within a window",
        ..PLAIN
    },
    Case {
        sinks: true,
        slopes: true,
        softcap: Some(1.5),
        window: Some(33),
        sequences: &[(300, 1), (0, 70)],
        why: "everything",
        ..PLAIN
    },
];

/// The definition, in f64, of one head of one query.
fn reference(
    q: &[f32],
    keys: &[&[f32]],
    values: &[&[f32]],
    scale: f32,
    softcap: Option<f32>,
    sink: Option<f32>,
    slope: f32,
) -> Vec<f64> {
    let scores: Vec<f64> = keys
        .iter()
        .enumerate()
        .map(|(i, key)| {
            let dot: f64 = q.iter().zip(*key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
            let score = dot * f64::from(scale);
            let score =
                softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
            score - f64::from(slope) * (keys.len() - 1 - i) as f64
        })
        .collect();
    let top = scores.iter().copied().chain(sink.map(f64::from)).fold(f64::NEG_INFINITY, f64::max);
    let total: f64 =
        scores.iter().copied().chain(sink.map(f64::from)).map(|score| (score - top).exp()).sum();
    (0..q.len())
        .map(|i| {
            scores
                .iter()
                .zip(values)
                .map(|(score, value)| (score - top).exp() / total * f64::from(value[i]))
                .sum()
        })
        .collect()
}

struct Setup {
    case: Case,
    cache: LayerCache,
    tables: Vec<Vec<u32>>,
    q: Vec<f32>,
    sinks: Option<Vec<f32>>,
    slopes: Option<Vec<f32>>,
    chosen: Vec<f32>,
    expected: Vec<f64>,
    rows: usize,
}

/// Fills a cache through its own `write`, and computes what must come out.
fn setup(case: Case, element: CacheType, isa: Isa) -> Setup {
    let mut noise = Noise(case.head_dim as u64);
    let Case { heads, kv_heads, head_dim, block_tokens, ring, .. } = case;
    let blocks = ring * case.sequences.len() + 1;
    let geometry = Geometry { element, blocks, block_tokens, kv_heads, head_dim, keys_only: false };
    // The second of two layers, so that offsets count.
    let cache = LayerCache::pool(geometry, 2).unwrap().remove(1);
    // Blocks in no particular order.
    let table = |sequence: usize| -> Vec<u32> {
        (0..ring).map(|i| (((sequence * ring + i) * 7 + 3) % blocks) as u32).collect()
    };
    let tables: Vec<Vec<u32>> = if blocks.is_multiple_of(7) {
        (0..case.sequences.len())
            .map(|s| (0..ring).map(|i| (s * ring + i) as u32).collect())
            .collect()
    } else {
        (0..case.sequences.len()).map(table).collect()
    };
    let rows: usize = case.sequences.iter().map(|&(_, tokens)| tokens).sum();
    let q: Vec<f32> = noise.many(rows * heads * head_dim).iter().map(|x| x * 4.0).collect();
    let sinks = case.sinks.then(|| noise.many(heads));
    let slopes: Option<Vec<f32>> =
        case.slopes.then(|| (0..heads).map(|h| 0.5 / (1 + 3 * h) as f32).collect());
    let (mut expected, mut row, mut chosen) = (Vec::new(), 0, Vec::new());
    let row_len = kv_heads * head_dim;
    for (table, &(position, tokens)) in tables.iter().zip(case.sequences) {
        let n = position + tokens;
        let (mut k, mut v) = (noise.many(n * row_len), noise.many(n * row_len));
        // In uneven pieces and by head, as workers would.
        for (from, to) in [(0, n / 3), (n / 3, n)] {
            for head in 0..kv_heads {
                // SAFETY: one thread, nobody else.
                unsafe { cache.write(isa, table, 0, &k, &v, row_len, from..to, head..head + 1) };
            }
        }
        [&mut k, &mut v].into_iter().for_each(|rows| round(element, rows));
        let oldest = oldest(&case, n);
        for token in 0..tokens {
            let p = position + token;
            let first = match case.window {
                Some(chunk) if case.chunked => p / chunk * chunk,
                window => window.map_or(0, |window| (p + 1).saturating_sub(window)),
            };
            let first = first.max(oldest).min(p);
            let mut seen: Vec<usize> = (first..=p).collect();
            if case.chosen > 0 {
                while seen.len() > case.chosen {
                    let at = ((noise.next() + 1.0) * 0.5 * seen.len() as f32) as usize;
                    seen.remove(at.min(seen.len() - 1));
                }
                chosen.extend((seen.len()..case.chosen).map(|_| -1.0));
                chosen.extend(seen.iter().map(|p| *p as f32));
            }
            for head in 0..heads {
                let at = head / (heads / kv_heads) * head_dim;
                let of = |rows: &'_ [f32]| -> Vec<Vec<f32>> {
                    seen.iter().map(|t| rows[t * row_len + at..][..head_dim].to_vec()).collect()
                };
                let (keys, values) = (of(&k), of(&v));
                let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
                let q = &q[(row * heads + head) * head_dim..][..head_dim];
                let sink = sinks.as_ref().map(|sinks| sinks[head]);
                let slope = slopes.as_ref().map_or(0.0, |slopes| slopes[head]);
                let scale = scale(head_dim);
                expected.extend(reference(q, &keys, &values, scale, case.softcap, sink, slope));
            }
            row += 1;
        }
    }
    Setup { case, cache, tables, q, sinks, slopes, chosen, expected, rows }
}

/// What a cache of `element` keeps of heads: ggml's blocks as `formats` reads and writes them.
fn round(element: CacheType, heads: &mut [f32]) {
    let block = |kind: DType, heads: &mut [f32]| {
        let mut bytes = vec![0; kind.bytes_for(heads.len() as u64).unwrap() as usize];
        kind.encode(heads, &mut bytes).unwrap();
        kind.decode(&bytes, heads).unwrap();
    };
    match element {
        CacheType::F16 => heads.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        CacheType::BF16 => heads.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        CacheType::F32 => {}
        CacheType::Q8_0 => block(DType::Q8_0, heads),
        CacheType::Turbo => {
            CacheType::rotate(heads);
            block(DType::Q4_0, heads);
            CacheType::rotate(heads);
        }
    }
}

const ELEMENTS: [CacheType; 5] =
    [CacheType::F16, CacheType::BF16, CacheType::F32, CacheType::Q8_0, CacheType::Turbo];

/// The largest error of an element that stores of `element` are computed with exactly, or with
/// rounded products.
fn bound(isa: Isa, element: CacheType, rounded: bool) -> f64 {
    let tiles = isa.to_string() == "amx" && ![CacheType::BF16, CacheType::F32].contains(&element);
    match (tiles, rounded, element) {
        // The tile unit has 16 bits of queries and probabilities, or 8.
        (true, true, _) => 8e-3,
        (true, false, CacheType::F16) => 1e-5,
        // Codes times scales have more bits than two bf16.
        (true, false, _) => 4e-5,
        // Turned, and turned back.
        (_, _, CacheType::Turbo) => 6e-6,
        _ => 3e-6,
    }
}

fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// What is left of `n` positions in the ring.
fn oldest(case: &Case, n: usize) -> usize {
    n.saturating_sub(case.ring * case.block_tokens)
}

fn attend(setup: &Setup, team: &Team, isa: Isa, rounded: bool) -> Vec<f32> {
    let case = &setup.case;
    let shape = AttentionShape {
        heads: case.heads,
        groups: case.kv_heads,
        head_dim: case.head_dim,
        scale: scale(case.head_dim),
        softcap: case.softcap,
        window: case.window,
        chunked: case.chunked,
    };
    let mut row = 0;
    let mut sequences = Vec::new();
    for (table, &(position, tokens)) in setup.tables.iter().zip(case.sequences) {
        sequences.push(QuerySequence {
            decodes: tokens == 1,
            table,
            row,
            tokens,
            position,
            oldest: oldest(case, position + tokens),
        });
        row += tokens;
    }
    let scratch = |decodes, keys| vec![f32::NAN; shape.scratch_len(team.count(), decodes, keys)];
    let width = case.heads * case.head_dim;
    let call = AttentionCall {
        shape: shape.split(team.count(), &sequences),
        cache: &setup.cache,
        sequences: &sequences,
        q: &setup.q,
        q_stride: width,
        sinks: setup.sinks.as_deref(),
        slopes: setup.slopes.as_deref(),
        chosen: (case.chosen > 0)
            .then_some(ChosenPositions { positions: &setup.chosen, count: case.chosen }),
        rounded,
    };
    let mut out = vec![f32::NAN; setup.rows * width];
    let decodes = case.sequences.iter().filter(|sequence| sequence.1 == 1).count();
    let keys = case.sequences.iter().map(|sequence| sequence.0 + 1).max().unwrap_or(0);
    // Scratch holds anything at all.
    let mut scratch = scratch(decodes, keys);
    let (shared, scratch) = (SharedSlice::new(&mut out), SharedSlice::new(&mut scratch));
    // SAFETY: `out` and `scratch` are this job's alone, and the cache rests.
    team.run(&|worker| unsafe { run(worker, isa, &call, shared, scratch) });
    out
}

#[test]
fn agrees_with_the_definition() {
    let teams: Vec<Team> = (1..=4).map(|threads| Team::new(threads).unwrap()).collect();
    for &case in CASES {
        for element in ELEMENTS.into_iter().filter(|e| e.check(case.head_dim).is_ok()) {
            for &isa in Isa::available() {
                let setup = setup(case, element, isa);
                for rounded in [false, true] {
                    let bound = bound(isa, element, rounded);
                    let mut one = None;
                    for team in &teams {
                        let out = attend(&setup, team, isa, rounded);
                        for (i, (&found, &expected)) in out.iter().zip(&setup.expected).enumerate()
                        {
                            let error = (f64::from(found) - expected).abs();
                            assert!(
                                error < bound,
                                "{}: {isa} {element:?} x{}: [{i}] {found} for {expected}",
                                case.why,
                                team.count()
                            );
                        }
                        // The numbers do not depend on the number of workers.
                        assert_eq!(
                            *one.get_or_insert_with(|| out.clone()),
                            out,
                            "{}: {isa} x{}",
                            case.why,
                            team.count()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_decode_row_does_not_depend_on_its_batch() {
    let team = Team::new(2).unwrap();
    for &isa in Isa::available() {
        let case = Case { sequences: &[(300, 1)], why: "alone", ..PLAIN };
        let alone = attend(&setup(case, CacheType::F16, isa), &team, isa, false);
        let many = Case { sequences: &[(300, 1), (40, 1), (0, 20)], why: "in company", ..PLAIN };
        let mut company = setup(many, CacheType::F16, isa);
        let single = setup(case, CacheType::F16, isa);
        company.q[..single.q.len()].copy_from_slice(&single.q);
        // The first sequence's keys and values, copied block by block through the tables.
        let width = PLAIN.kv_heads * PLAIN.head_dim;
        let mut noise = Noise(PLAIN.head_dim as u64);
        noise.many(PLAIN.heads * PLAIN.head_dim);
        let (k, v) = (noise.many(301 * width), noise.many(301 * width));
        // SAFETY: one thread, nobody else.
        unsafe {
            company.cache.write(
                isa,
                &company.tables[0],
                0,
                &k,
                &v,
                width,
                0..301,
                0..PLAIN.kv_heads,
            )
        };
        let out = attend(&company, &team, isa, false);
        assert_eq!(out[..alone.len()], alone, "{isa}");
    }
}

/// What is read of a block is ggml's codes and scales, bit for bit, on every instruction set;
/// written to another block it is read again.
#[test]
fn codes_are_ggmls() {
    let (kv_heads, head_dim, block_tokens) = (2, 64, 32);
    let row = kv_heads * head_dim;
    let mut noise = Noise(5);
    let (k, v) = (noise.many(block_tokens * row), noise.many(block_tokens * row));
    for (element, kind) in [(CacheType::Q8_0, DType::Q8_0), (CacheType::Turbo, DType::Q4_0)] {
        let mut expected = Vec::new();
        for rows in [&k, &v] {
            let mut rows = rows.clone();
            if element.rotates() {
                CacheType::rotate(&mut rows);
            }
            let mut bytes = vec![0; element.bytes(rows.len())];
            kind.encode(&rows, &mut bytes).unwrap();
            let blocks = || bytes.chunks_exact(element.bytes(32));
            for block in blocks() {
                let codes = &block[2..];
                if element == CacheType::Turbo {
                    let code = |i: usize| codes[i % 16] >> (i / 16 * 4) & 15;
                    expected.extend((0..16).map(|j| code(2 * j) | code(2 * j + 1) << 4));
                } else {
                    expected.extend(codes);
                }
            }
            expected.extend(blocks().flat_map(|block| &block[..2]));
        }
        let keys_only = false;
        let geometry = Geometry { element, blocks: 3, block_tokens, kv_heads, head_dim, keys_only };
        for &isa in Isa::available() {
            let alone = Geometry { keys_only: true, ..geometry };
            let alone = LayerCache::pool(alone, 2).unwrap().remove(1);
            let mut keys = Vec::new();
            // SAFETY: one thread, nobody else.
            unsafe {
                alone.write(isa, &[2], 0, &k, &k, row, 0..block_tokens, 0..kv_heads);
                alone.read_block(2, &mut keys);
            }
            assert_eq!(keys.len(), alone.plain_bytes());
            assert!(keys == expected[..expected.len() / 2], "{isa} {element:?}, keys alone");
            let cache = LayerCache::pool(geometry, 2).unwrap().remove(1);
            let (mut found, mut again) = (Vec::new(), Vec::new());
            // SAFETY: one thread, nobody else.
            unsafe {
                cache.write(isa, &[2], 0, &k, &v, row, 0..block_tokens, 0..kv_heads);
                cache.read_block(2, &mut found);
                cache.write_block(1, &found);
                cache.read_block(1, &mut again);
            }
            assert_eq!(found.len(), cache.plain_bytes());
            assert!(found == expected, "{isa} {element:?}");
            assert!(again == expected, "{isa} {element:?}, read again");
        }
    }
}

#[test]
fn blocks_copy_and_nonsense_is_an_error() {
    let geometry = Geometry {
        element: CacheType::F16,
        blocks: 3,
        block_tokens: 16,
        kv_heads: 1,
        head_dim: 8,
        keys_only: false,
    };
    let cache = LayerCache::pool(geometry, 2).unwrap().remove(1);
    let row: Vec<f32> = (0..8).map(|i| i as f32).collect();
    // SAFETY: one thread, nobody else.
    unsafe {
        cache.write(Isa::Scalar, &[1], 5, &row, &row, 8, 0..1, 0..1);
        cache.copy_block(1, 2);
        let (mut from, mut to) = (Vec::new(), Vec::new());
        cache.read_block(1, &mut from);
        cache.read_block(2, &mut to);
        assert_eq!(from, to);
        let row: Vec<u8> = row.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
        // The keys of its 16 positions come first, then the values.
        assert_eq!((&to[5 * 16..6 * 16], &to[(16 + 5) * 16..(16 + 6) * 16]), (&row[..], &row[..]));
    }
    for wrong in [
        Geometry { block_tokens: 24, ..geometry },
        Geometry { block_tokens: 0, ..geometry },
        Geometry { head_dim: MAX_HEAD_DIM + 1, ..geometry },
        Geometry { head_dim: 0, ..geometry },
        Geometry { kv_heads: 0, ..geometry },
        Geometry { blocks: usize::MAX / 2, ..geometry },
    ] {
        assert!(LayerCache::pool(wrong, 2).is_err(), "{wrong:?}");
    }
}

/// Scores by which an indexer chooses, of every instruction set and stored type.
#[test]
fn scores_of_an_indexer_agree_with_the_definition() {
    for (heads, head_dim, positions) in [(1, 32, 0..1), (6, 64, 0..200), (4, 128, 256..300)] {
        for (isa, element) in
            Isa::available().iter().flat_map(|&isa| ELEMENTS.map(|element| (isa, element)))
        {
            let mut noise = Noise(heads as u64);
            let geometry = Geometry {
                element,
                blocks: 6,
                block_tokens: 64,
                kv_heads: 1,
                head_dim,
                keys_only: false,
            };
            let cache = LayerCache::pool(geometry, 2).unwrap().remove(1);
            let table = [4, 2, 0, 5, 1];
            let mut k = noise.many(positions.end * head_dim);
            let all = 0..positions.end;
            // SAFETY: one thread, nobody else.
            unsafe { cache.write(isa, &table, 0, &k, &k, head_dim, all, 0..1) };
            round(element, &mut k);
            let (q, weights) = (noise.many(heads * head_dim), noise.many(heads));
            let mut found = vec![f32::NAN; indexer::POSITIONS];
            let row = indexer::Row { q: &q, weights: &weights, table: &table };
            // SAFETY: as above.
            unsafe { indexer::scores(isa, &cache, row, positions.clone(), &mut found) };
            for (p, found) in positions.clone().zip(found) {
                let product = |h: usize| -> f64 {
                    let q = &q[h * head_dim..][..head_dim];
                    let key = &k[p * head_dim..][..head_dim];
                    q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
                };
                let score = |h: usize| f64::from(weights[h]) * product(h).max(0.0);
                let wanted: f64 = (0..heads).map(score).sum();
                let apart = (f64::from(found) - wanted).abs();
                assert!(apart < 2e-5, "{isa}, {element:?}, {heads} x {head_dim}: {p}: {apart:e}");
            }
        }
    }
}
