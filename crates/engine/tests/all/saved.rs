//! Sessions that are forked, written to files and read back, and what they show of their cache.

use std::fs;
use std::path::Path;

use crate::common::{error, load, root, stories};
use delft_engine::{
    CacheType, DeviceSpec, Engine, GenerateOptions, LoadOptions, LogitRows, Request, Session,
};

fn engine(case: &str, place: &str, cache_type: CacheType) -> Engine {
    // Loaded for many sequences, a GPU has blocks that are nobody's.
    let (place, batched) = place.strip_prefix("batched ").map_or((place, false), |of| (of, true));
    let device: DeviceSpec = place.parse().unwrap();
    load(&root().join(case), &LoadOptions { cache_type, batched, ..LoadOptions::on(device) })
}

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + 11) % 120).collect()
}

/// The logits behind each of `tokens`, which are computed one by one.
fn continued(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    for token in tokens {
        session.evaluate(&[*token], 0, &mut |_, row| all.extend_from_slice(row)).unwrap();
    }
    all
}

#[test]
fn a_fork_goes_its_own_way() {
    for (case, place) in [
        ("llama3", "cpu"),
        ("mistral-long", "cpu"),
        ("qwen3", "sim"),
        ("llama3", "batched sim"),
        ("qwen3.5", "cpu"),
        ("qwen3.5", "sim"),
        ("qwen3.5", "batched sim"),
        ("deepseek_v32-chosen", "cpu"),
        ("deepseek_v32-chosen", "sim"),
    ] {
        let engine = engine(case, place, CacheType::F16);
        let (base, one, other) = (prompt(21), [5, 6, 7], [9, 8, 7]);
        let alone = |tail: &[u32]| {
            let mut session = engine.session();
            session.evaluate(&base, base.len(), &mut |_, _| {}).unwrap();
            continued(&mut session, tail)
        };
        let (expected_one, expected_other) = (alone(&one), alone(&other));
        let mut session = engine.session();
        session.evaluate(&base, base.len(), &mut |_, _| {}).unwrap();
        let mut fork = session.fork();
        assert_eq!(fork.tokens(), base);
        let mut ours = Vec::new();
        let mut theirs = Vec::new();
        for (a, b) in one.iter().zip(&other) {
            ours.extend(continued(&mut session, &[*a]));
            theirs.extend(continued(&mut fork, &[*b]));
        }
        assert!(ours == expected_one && theirs == expected_other, "{case} on {place}");
        drop(session);
        assert_eq!(fork.tokens(), [&base[..], &other].concat());
    }
}

#[test]
fn a_saved_session_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    for (case, place, cache_type) in [
        ("llama3", "cpu", CacheType::F16),
        ("mistral-long", "cpu", CacheType::F32),
        ("gemma2", "cpu", CacheType::BF16),
        ("qwen3-next", "cpu", CacheType::F16),
        ("granite4-hybrid", "cpu", CacheType::F16),
        ("qwen3", "sim", CacheType::F16),
        ("qwen3.5", "batched sim", CacheType::F16),
        ("llama3", "batched sim", CacheType::F16),
        ("deepseek_v32-chosen", "cpu", CacheType::F16),
        ("glm_moe_dsa-chosen", "batched sim", CacheType::F16),
    ] {
        let engine = engine(case, place, cache_type);
        let (base, tail) = (prompt(40), [5, 6, 7]);
        let mut session = engine.session();
        session.evaluate(&base, base.len(), &mut |_, _| {}).unwrap();
        session.save(&path).unwrap();
        let expected = continued(&mut session, &tail);
        let mut other = engine.session();
        other.evaluate(&[3, 4], 2, &mut |_, _| {}).unwrap();
        other.restore(&path).unwrap();
        assert_eq!(other.tokens(), base);
        assert!(continued(&mut other, &tail) == expected, "{case} on {place}");
    }
}

#[test]
fn a_cache_passes_between_devices() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let [on_cpu, on_sim] = ["cpu", "sim"].map(|place| engine("llama3", place, CacheType::F32));
    let mut session = on_cpu.session();
    session.evaluate(&prompt(30), 30, &mut |_, _| {}).unwrap();
    session.save(&path).unwrap();
    let mut other = on_sim.session();
    other.restore(&path).unwrap();
    for layer in 0..on_cpu.info().layers {
        assert_eq!(session.cached(layer).unwrap(), other.cached(layer).unwrap());
    }
    let ours = session.logits(&prompt(31), LogitRows::Last(1)).unwrap().data;
    let theirs = other.logits(&prompt(31), LogitRows::Last(1)).unwrap().data;
    let range = ours.iter().fold(0.0, |range: f32, x| range.max(x.abs()));
    let worst = ours.iter().zip(&theirs).fold(0.0, |worst: f32, (a, b)| worst.max((a - b).abs()));
    assert!(worst <= 1e-4 * range, "{worst} of {range}");
}

/// What a cache of codes shows is near what one of f32 shows, a fork reads it, and a file brings it
/// back, to another device too. The bundled model: its heads are whole blocks.
#[test]
fn a_cache_of_codes_is_saved_and_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let session = |place: &str, cache_type| {
        let options = LoadOptions { cache_type, ..LoadOptions::on(place.parse().unwrap()) };
        load(&stories(), &options).session()
    };
    let base = prompt(40);
    let mut exact = session("cpu", CacheType::F32);
    exact.evaluate(&base, base.len(), &mut |_, _| {}).unwrap();
    for (cache_type, other, bound) in
        [(CacheType::Q8_0, "sim", 0.005), (CacheType::Turbo, "sim", 0.08)]
    {
        let mut first = session("cpu", cache_type);
        first.evaluate(&base, base.len(), &mut |_, _| {}).unwrap();
        let (expected, found) = (exact.cached(0).unwrap(), first.cached(0).unwrap());
        for (expected, found) in [(expected.keys, &found.keys), (expected.values, &found.values)] {
            let worst = error(found, &expected);
            println!("{cache_type:?}: {worst:e}");
            assert!(worst > 0.0 && worst <= bound, "{cache_type:?}: {worst:e}");
        }
        first.save(&path).unwrap();
        let mut second = session(other, cache_type);
        second.restore(&path).unwrap();
        assert_eq!(second.cached(1).unwrap(), first.cached(1).unwrap());
        let mut fork = first.fork();
        let expected = continued(&mut first, &[5, 6]);
        assert_eq!(continued(&mut fork, &[5, 6]), expected);
        let worst = error(&continued(&mut second, &[5, 6]), &expected);
        assert!(
            worst <= if cache_type == CacheType::Q8_0 { 3e-2 } else { 2e-1 },
            "{cache_type:?}: {worst:e}"
        );
    }
}

#[test]
fn what_was_not_saved_by_this_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let engine_of = |case: &str| engine(case, "cpu", CacheType::F16);
    let engine = engine_of("llama3");
    let mut session = engine.session();
    session.evaluate(&prompt(12), 12, &mut |_, _| {}).unwrap();
    session.save(&path).unwrap();
    let sound = fs::read(&path).unwrap();
    let refused = |engine: &Engine, path: &Path, expected: &str| {
        let mut session = engine.session();
        session.evaluate(&[1, 2, 3], 3, &mut |_, _| {}).unwrap();
        let why = session.restore(path).unwrap_err().to_string();
        assert!(why.contains(expected) && why.contains("session"), "{why}");
        assert!(session.tokens().is_empty(), "{why}");
    };
    refused(&engine_of("llama2"), &path, "the cache of this model");
    let wider = self::engine("llama3", "cpu", CacheType::F32);
    refused(&wider, &path, "a cache of this type");
    for (change, expected) in [
        ((0, b'x'), "a cache that a session saved"),
        ((11, 0xff), "a header of at most"),
        ((sound.len() - 40, sound[sound.len() - 40] ^ 1), "the checksum"),
        ((sound.len() - 1, !sound[sound.len() - 1]), "the checksum"),
    ] {
        let mut damaged = sound.clone();
        damaged[change.0] = change.1;
        fs::write(&path, damaged).unwrap();
        refused(&engine, &path, expected);
    }
    for (length, expected) in [
        (0, "a file that ends within it"),
        (5, "a file that ends within it"),
        (12, "a file that ends within it"),
        (40, "a file that ends within it"),
        (sound.len() / 2, "bytes"),
        (sound.len() - 1, "bytes"),
    ] {
        fs::write(&path, &sound[..length]).unwrap();
        refused(&engine, &path, expected);
    }
    fs::write(&path, [&sound[..], b"more"].concat()).unwrap();
    refused(&engine, &path, "bytes");
    // Every byte of the header, and some of the rest: an error or the same tokens, never a panic.
    let header = 12 + u32::from_le_bytes([sound[8], sound[9], sound[10], sound[11]]) as usize;
    for at in (8..header).chain((header..sound.len()).step_by(997)) {
        let mut damaged = sound.clone();
        damaged[at] ^= 0x15;
        fs::write(&path, damaged).unwrap();
        assert!(engine.session().restore(&path).is_err(), "byte {at}");
    }
}

/// What requests computed is saved without computing it again, and found by requests of another
/// engine of the same model.
#[test]
fn a_sequence_of_requests_is_saved_and_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sequence");
    for (case, place) in
        [("llama3", "cpu"), ("gemma2", "cpu"), ("qwen3-next", "cpu"), ("qwen3", "sim")]
    {
        let [one, other] = [0, 1].map(|_| engine(case, place, CacheType::F16));
        let options = || GenerateOptions { max_tokens: Some(6), ..GenerateOptions::default() };
        let ask = |engine: &Engine, tokens: &[u32]| {
            let mut asked = engine.submit(Request::new(tokens.to_vec(), options())).unwrap();
            let chosen: Vec<u32> = asked.by_ref().map(|token| token.unwrap().id).collect();
            (chosen, asked.metrics().reused_tokens)
        };
        let mut tokens = prompt(40);
        tokens.extend(ask(&one, &tokens).0);
        one.save_cached(&tokens, &path).unwrap();
        assert_eq!(other.restore_cached(&path).unwrap(), tokens, "{case} on {place}");
        let longer = [&tokens[..], &[5, 6, 7]].concat();
        let ((expected, _), (found, reused)) = (ask(&one, &longer), ask(&other, &longer));
        assert_eq!((found, reused), (expected, tokens.len()), "{case} on {place}");
    }
}
