#!/bin/sh
# Fills corpus/TARGET with what is committed, and with what DELFT_TEST_DATA holds where it is set.
set -eu
cd "$(dirname "$0")"
root=..
for target in gguf safetensors config chat_template tokenizer_json; do mkdir -p "corpus/$target"; done

# put TARGET MOST FILE...: copies files of at most so many bytes, named by their content.
put() {
    target=$1 most=$2
    shift 2
    for file in "$@"; do
        if [ -f "$file" ] && [ "$(wc -c < "$file")" -le "$most" ]; then
            cp "$file" "corpus/$target/$(sha256sum "$file" | cut -c 1-16)"
        fi
    done
}

reference=$root/tests/reference
models=$reference/models
tokens=$root/crates/tokens/tests/data
put gguf 200000 $root/crates/formats/tests/data/gguf/*.gguf $models/*/model.*.gguf
put gguf 200000 $reference/adapters/*/*.gguf $reference/importance/*.gguf $reference/embeddings/*/*.gguf
put safetensors 100000 $models/*/model*.safetensors $models/*/folder/*.safetensors
put safetensors 100000 $reference/adapters/*/adapter*.safetensors $reference/adapters/*/mlx/*.safetensors
put config 100000 $models/*/config*.json $models/*/folder/config.json $reference/embeddings/*/config.json
put tokenizer_json 100000 $tokens/*/tokenizer.json $reference/answers/tokenizer.json
put chat_template 100000 $tokens/templates/own/*.jinja
if [ -n "${DELFT_TEST_DATA:-}" ]; then
    put chat_template 100000 "$DELFT_TEST_DATA"/suites/llama.cpp-templates/*.jinja
fi
for target in gguf safetensors config chat_template tokenizer_json; do
    echo "$target: $(find "corpus/$target" -type f | wc -l) files"
done
