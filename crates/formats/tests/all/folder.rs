//! Safetensors files and Hugging Face folders: valid ones against the `safetensors` crate, and
//! hostile ones.

use std::fs;
use std::path::Path;

use crate::build::safetensors as bytes_of;
use delft_formats::{Container, DType, Folder, Safetensors, TensorView, Tensors, safetensors};

fn tensor<'a>(name: &'a str, dtype: DType, shape: &'a [usize], bytes: &'a [u8]) -> TensorView<'a> {
    TensorView { name, dtype, shape, bytes }
}

#[test]
fn files_agree_with_the_safetensors_crate() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let data: Vec<u8> = (0..200).collect();
    // Ours to theirs.
    let tensors = [
        tensor("b.weight", DType::F32, &[2, 3], &data[..24]),
        tensor("a \"quoted\" 世", DType::BF16, &[4], &data[24..32]),
        tensor("scalar", DType::I64, &[], &data[32..40]),
        tensor("flags", DType::Bool, &[3, 1, 2], &data[40..46]),
        tensor("empty", DType::F16, &[0, 7], &[]),
    ];
    safetensors::write(&path, &[("format", "pt"), ("note", "x")], tensors).unwrap();
    let file = fs::read(&path).unwrap();
    let theirs = ::safetensors::SafeTensors::deserialize(&file).unwrap();
    assert_eq!(theirs.len(), tensors.len());
    for t in tensors {
        let view = theirs.tensor(t.name).unwrap();
        assert_eq!((view.shape(), view.data()), (t.shape, t.bytes));
        assert!(format!("{:?}", view.dtype()).eq_ignore_ascii_case(t.dtype.name()));
    }
    let (_, metadata) = ::safetensors::SafeTensors::read_metadata(&file).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let open = Safetensors::open(&path).unwrap();
    assert_eq!(
        open.header().metadata,
        [("format".into(), "pt".into()), ("note".into(), "x".into())]
    );
    for t in tensors {
        assert_eq!(open.get(t.name), Some(t));
    }
    assert_eq!(open.get("empty").unwrap().elements(), 0);
    assert_eq!(open.iter().count(), 5);

    // Metadata that are null, as MLX writes where there are none.
    let header = r#"{"__metadata__":null,"a":{"data_offsets":[0,4],"dtype":"U8","shape":[4]}}"#;
    fs::write(&path, bytes_of(header, 4)).unwrap();
    let open = Safetensors::open(&path).unwrap();
    assert!(open.header().metadata.is_empty() && open.get("a").is_some());

    // Theirs to ours.
    use ::safetensors::tensor::{Dtype, TensorView, serialize};
    let views = [
        ("x", TensorView::new(Dtype::F16, vec![5], &data[..10]).unwrap()),
        ("y", TensorView::new(Dtype::F64, vec![1, 2], &data[10..26]).unwrap()),
        ("z", TensorView::new(Dtype::U8, vec![], &data[26..27]).unwrap()),
    ];
    fs::write(&path, serialize(views, None).unwrap()).unwrap();
    let open = Safetensors::open(&path).unwrap();
    assert_eq!(open.get("x"), Some(tensor("x", DType::F16, &[5], &data[..10])));
    assert_eq!(open.get("y"), Some(tensor("y", DType::F64, &[1, 2], &data[10..26])));
    assert_eq!(open.get("z"), Some(tensor("z", DType::U8, &[], &data[26..27])));
    assert!(open.get("w").is_none());
}

#[test]
fn writing_refuses_what_the_format_cannot_hold() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    for (tensors, part) in [
        (vec![tensor("a", DType::F32, &[2], &[0; 7])], "found 7 bytes"),
        (vec![tensor("a", DType::Q4_0, &[32], &[0; 18])], "a type that safetensors has"),
        (vec![tensor("a", DType::U8, &[1], &[0]), tensor("a", DType::U8, &[1], &[0])], "a twice"),
        (vec![tensor("__metadata__", DType::U8, &[1], &[0])], "a name"),
    ] {
        let error = safetensors::write(&path, &[], tensors).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn hostile_headers_are_refused_with_a_reason() {
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |a: &str, b: &str| {
        let entry = |offsets| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}"#);
        format!(r#"{{"a":{},"b":{}}}"#, entry(a), entry(b))
    };
    let again = r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#;
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "a header length"),
        ("seven bytes", vec![0; 7], "a header length"),
        ("header of 2^64-1", vec![0xFF; 64], "at most 100000000 bytes"),
        (
            "header past the end",
            [100u64.to_le_bytes().to_vec(), b"{}".to_vec()].concat(),
            "a header of 100 bytes",
        ),
        ("header of 0", bytes_of("", 0), "begins with {"),
        ("not an object", bytes_of("[]", 0), "begins with {"),
        ("not JSON", bytes_of("{\"a\"", 0), "in JSON"),
        ("not UTF-8", [4u64.to_le_bytes().to_vec(), b"{\"\xFF}".to_vec()].concat(), "in JSON"),
        ("deep", bytes_of(&deep, 0), "in JSON"),
        ("tensor is a number", bytes_of(r#"{"a":1}"#, 0), "in JSON"),
        (
            "no dtype",
            bytes_of(r#"{"a":{"shape":[0],"data_offsets":[0,0]}}"#, 0),
            "missing field `dtype`",
        ),
        ("metadata of numbers", bytes_of(r#"{"__metadata__":{"a":1}}"#, 0), "in JSON"),
        (
            "metadata twice",
            bytes_of(r#"{"__metadata__":{},"__metadata__":{}}"#, 0),
            "__metadata__ twice",
        ),
        ("metadata key twice", bytes_of(r#"{"__metadata__":{"a":"","a":""}}"#, 0), "a twice"),
        ("name twice", bytes_of(again, 0), "a twice"),
        ("negative offset", bytes_of(&one("U8", "[4]", "[-1,3]"), 4), "in JSON"),
        ("huge shape", bytes_of(&one("U8", "[18446744073709551616]", "[0,4]"), 4), "in JSON"),
        ("float8", bytes_of(&one("F8_E5M2", "[4]", "[0,4]"), 4), "F8_E5M2, which is not supported"),
        ("lower case", bytes_of(&one("f32", "[1]", "[0,4]"), 4), "f32, which is not supported"),
        (
            "a block type",
            bytes_of(&one("Q4_0", "[32]", "[0,18]"), 18),
            "Q4_0, which is not supported",
        ),
        ("begin past end", bytes_of(&one("U8", "[4]", "[4,0]"), 4), "found [4, 0]"),
        ("past the file", bytes_of(&one("U8", "[5]", "[0,5]"), 4), "cut short"),
        (
            "wrong size",
            bytes_of(&one("F32", "[2]", "[0,4]"), 4),
            "expected 8 bytes for F32 [2], found 4 bytes",
        ),
        (
            "product overflows",
            bytes_of(&one("U8", "[4294967296,4294967296]", "[0,0]"), 0),
            "fits 64 bits",
        ),
        (
            "bytes overflow",
            bytes_of(&one("F64", "[2305843009213693952]", "[0,0]"), 0),
            "fits 64 bits",
        ),
        (
            "hole",
            bytes_of(&two("[0,4]", "[5,9]"), 9),
            "tensor b: expected data that begins at offset 4",
        ),
        ("hole first", bytes_of(&one("U8", "[4]", "[1,5]"), 5), "begins at offset 0"),
        (
            "overlap",
            bytes_of(&two("[0,4]", "[2,6]"), 6),
            "tensor b: expected data that begins at offset 4",
        ),
        ("same data", bytes_of(&two("[0,4]", "[0,4]"), 4), "tensor b"),
        ("trailing bytes", bytes_of(&one("U8", "[4]", "[0,4]"), 5), "bytes"),
    ];
    for (case, bytes, part) in cases {
        let error = safetensors::parse(&bytes, "m").expect_err(case).to_string();
        assert!(error.contains(part), "{case}: {error:?} lacks {part:?}");
        assert!(error.len() < 600, "{case}: {error:?}");
        // Stricter than the reference only where listed: types it knows and Delft does not store,
        // names that repeat.
        let theirs = ::safetensors::SafeTensors::deserialize(&bytes);
        let stricter = ["float8", "name twice", "metadata key twice", "metadata twice"];
        assert!(theirs.is_err() || stricter.contains(&case), "{case}: the reference accepts it");
    }
}

/// A file's name and content.
type Named<'a> = (&'a str, Vec<u8>);

/// A folder of the named files.
fn folder(files: &[Named<'_>]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn shard(names: &[&str]) -> Vec<u8> {
    let entries: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(i, n)| {
            format!(
                r#""{n}":{{"dtype":"U8","shape":[2],"data_offsets":[{},{}]}}"#,
                2 * i,
                2 * i + 2
            )
        })
        .collect();
    bytes_of(&format!("{{{}}}", entries.join(",")), 2 * names.len())
}

const CONFIG: (&str, &[u8]) = ("config.json", br#"{"architectures":["Llama"],"hidden_size":64}"#);
const INDEX: &str = "model.safetensors.index.json";

fn config() -> (&'static str, Vec<u8>) {
    (CONFIG.0, CONFIG.1.to_vec())
}

fn index(map: &str) -> (&'static str, Vec<u8>) {
    (INDEX, format!(r#"{{"metadata":{{"total_size":8}},"weight_map":{map}}}"#).into_bytes())
}

#[test]
fn folders_open_with_and_without_an_index() {
    let names =
        |path: &Path| Tensors::open(path).unwrap().names().map(str::to_string).collect::<Vec<_>>();
    let single = folder(&[
        config(),
        ("model.safetensors", shard(&["b", "a"])),
        ("extra.safetensors", shard(&["a"])),
        ("tokenizer.json", b"{}".to_vec()),
        ("generation_config.json", br#"{"temperature":0.5}"#.to_vec()),
    ]);
    assert_eq!(names(single.path()), ["a", "b"]);
    assert_eq!(names(&single.path().join("model.safetensors")), ["a", "b"]);
    let open = Tensors::open(single.path()).unwrap();
    assert_eq!(
        (open.kind(), open.total_bytes(), open.path()),
        (Container::Folder, 4, single.path())
    );
    assert_eq!(open.get("a").unwrap().bytes, [2, 3]);
    let inner = open.folder().unwrap();
    assert_eq!(inner.config()["hidden_size"], 64);
    assert_eq!(inner.generation_config().unwrap()["temperature"], 0.5);
    assert_eq!(inner.tokenizer_files(), [single.path().join("tokenizer.json")]);
    assert_eq!(inner.file("merges.txt"), None);
    open.touch(open.get("a").unwrap().bytes);
    open.release(&open.get("a").unwrap());
    assert_eq!(open.get("a").unwrap().bytes, [2, 3]);

    let every =
        folder(&[config(), ("x.safetensors", shard(&["c"])), ("y.safetensors", shard(&["a"]))]);
    assert_eq!(names(every.path()), ["a", "c"]);

    let indexed = folder(&[
        config(),
        index(r#"{"a":"m-1.safetensors","c":"m-2.safetensors","b":"m-1.safetensors"}"#),
        ("m-1.safetensors", shard(&["a", "b", "unlisted"])),
        ("m-2.safetensors", shard(&["b", "c"])),
        ("consolidated.safetensors", shard(&["a", "b", "c"])),
    ]);
    let open = Folder::open(indexed.path()).unwrap();
    assert_eq!(open.iter().map(|t| t.name.to_string()).collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!((open.len(), open.weights().len()), (3, 2));
    assert_eq!(open.get("b").unwrap().bytes, [2, 3], "the index says which of two");
    assert!(open.generation_config().is_none());
}

#[test]
fn numbers_that_only_python_writes_are_read() {
    let config =
        br#"{"limit": [0.0, Infinity], "low": -Infinity, "nan": NaN, "text": "a \"NaN\\", "b": 1}"#;
    let folder = folder(&[("config.json", config.to_vec()), ("m.safetensors", shard(&["a"]))]);
    let open = Folder::open(folder.path()).unwrap();
    let number = |name: &str| serde_json::json!({ "__float__": name });
    assert_eq!(open.config()["limit"], serde_json::json!([0.0, number("Infinity")]));
    assert_eq!(open.config()["low"], number("-Infinity"));
    assert_eq!(open.config()["nan"], number("NaN"));
    assert_eq!(open.config()["text"], "a \"NaN\\");
}

#[test]
fn broken_folders_are_refused_with_a_reason() {
    let a = || ("m.safetensors", shard(&["a"]));
    let cases: Vec<(&str, Vec<Named<'_>>, &str)> = vec![
        (
            "no config",
            vec![a()],
            "config.json: expected the configuration of the weights in m.safetensors, found no such file",
        ),
        ("gguf inside", vec![("x.gguf", vec![])], "x.gguf"),
        (
            "config not JSON",
            vec![("config.json", b"{".to_vec()), a()],
            "config.json: no valid JSON: ",
        ),
        ("config not an object", vec![("config.json", b"[]".to_vec()), a()], "a JSON object"),
        ("no weights", vec![config()], "weights in *.safetensors, found none"),
        (
            "pickled weights",
            vec![config(), ("pytorch_model.bin", vec![])],
            "convert the PyTorch checkpoint",
        ),
        (
            "twice",
            vec![config(), ("x.safetensors", shard(&["a"])), ("y.safetensors", shard(&["a"]))],
            "a twice",
        ),
        ("missing shard", vec![config(), index(r#"{"a":"n.safetensors"}"#), a()], "n.safetensors"),
        (
            "absent tensor",
            vec![config(), index(r#"{"b":"m.safetensors"}"#), a()],
            "tensor b, which model.safetensors",
        ),
        ("no map", vec![config(), (INDEX, b"{}".to_vec()), a()], "weight_map"),
        (
            "empty map",
            vec![config(), index("{}"), a()],
            "weight_map: expected tensors and their files, found none",
        ),
        ("map of numbers", vec![config(), index(r#"{"a":1}"#), a()], "the name of a file"),
        ("index not JSON", vec![config(), (INDEX, b"nul".to_vec()), a()], "no valid JSON"),
    ];
    for (case, files, part) in cases {
        let dir = folder(&files);
        let error = Tensors::open(dir.path()).expect_err(case).to_string();
        assert!(error.contains(part), "{case}: {error:?} lacks {part:?}");
    }
    let outside = folder(&[a()]);
    let absolute = outside.path().join("m.safetensors").display().to_string();
    for shard in [
        "../m.safetensors",
        "a/../../m.safetensors",
        "sub/m.safetensors",
        "..",
        ".",
        "",
        "a\\m.safetensors",
        &absolute,
    ] {
        let map = serde_json::json!({ "a": shard }).to_string();
        let dir = folder(&[config(), index(&map), a()]);
        let error = Tensors::open(dir.path()).expect_err(shard).to_string();
        assert!(error.contains("inside the folder"), "{shard}: {error:?}");
    }
}

/// Files beside `config.json` in which quantising programs state their settings.
#[test]
fn quantisation_is_read_from_the_file_beside() {
    let weights = || ("model.safetensors", shard(&["a"]));
    let cases = [
        (
            "quantize_config.json",
            r#"{"bits":4,"sym":true}"#,
            r#"{"bits":4,"sym":true,"quant_method":"gptq"}"#,
        ),
        ("quant_config.json", r#"{"w_bit":4}"#, r#"{"w_bit":4,"quant_method":"awq"}"#),
        (
            "hf_quant_config.json",
            r#"{"producer":{"name":"modelopt"},"quantization":{"quant_algo":"FP8"}}"#,
            r#"{"quant_algo":"FP8","quant_method":"modelopt"}"#,
        ),
    ];
    for (name, text, expected) in cases {
        let dir = folder(&[config(), (name, text.into()), weights()]);
        let open = Folder::open(dir.path()).unwrap();
        let found = open.config()["quantization_config"].clone();
        assert_eq!(found, serde_json::from_str::<serde_json::Value>(expected).unwrap(), "{name}");
        assert_eq!(open.remarks().len(), 1);
        assert!(open.remarks()[0].starts_with(name), "{:?}", open.remarks());
        // The configuration goes before it.
        let stated = br#"{"hidden_size":64,"quantization_config":{"quant_method":"fp8"}}"#.to_vec();
        let dir = folder(&[("config.json", stated), (name, text.into()), weights()]);
        let open = Folder::open(dir.path()).unwrap();
        assert_eq!(open.config()["quantization_config"]["quant_method"], "fp8");
        assert!(open.remarks().is_empty());
    }
}

/// What editors, Git and copied caches leave.
#[test]
fn marks_pointers_links_and_stale_indices() {
    let marked = |text: &[u8]| [b"\xef\xbb\xbf", text].concat();
    let open = folder(&[
        ("config.json", marked(CONFIG.1)),
        ("generation_config.json", marked(b"{}")),
        ("model.safetensors", shard(&["a"])),
        // Of the same weights in another form, which is not there.
        index(r#"{"a":"model-00001-of-00002.safetensors"}"#),
    ]);
    let open = Folder::open(open.path()).unwrap();
    assert_eq!((open.config()["hidden_size"].as_u64(), open.len()), (Some(64), 1));

    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n".to_vec();
    for files in [
        vec![config(), ("model.safetensors", pointer.clone())],
        vec![("config.json", pointer), ("model.safetensors", shard(&["a"]))],
    ] {
        let error = Tensors::open(folder(&files).path()).unwrap_err().to_string();
        assert!(error.contains("git lfs pull"), "{error}");
    }

    #[cfg(unix)]
    {
        let dir = folder(&[config()]);
        std::os::unix::fs::symlink("gone", dir.path().join("model.safetensors")).unwrap();
        let error = Tensors::open(dir.path()).unwrap_err().to_string();
        let found = "model.safetensors: expected weights, found a link to a file that is not there";
        assert!(error.contains(found), "{error}");
    }
}
