"""Images of prompts: what may hold one, what is refused, and that text alone imports nothing for them."""

import base64
import io
import pickle
import threading
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from PIL import Image

from rlbench.data.prompts import encoded
from rlbench.data.prompts.images import EncodedImage
from rlbench.errors import DataError


def png(width=6, height=4, colour=(200, 30, 30), kind="PNG"):
    stream = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(stream, kind)
    return stream.getvalue()


def bomb(width, height):
    """A PNG whose header claims so many pixels and whose data are a few bytes."""

    def chunk(name, data):
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    packed = zlib.compress(bytes(10_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def test_every_holder_gives_the_same_image(tmp_path):
    data = png()
    (path := tmp_path / "a b.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    holders = [data, bytearray(data), path, str(path), path.as_uri(), url, {"bytes": data, "path": "gone.png"}]
    holders += [{"bytes": None, "path": str(path)}, {"url": url}]
    read = [EncodedImage.from_any(one) for one in holders]
    assert len(set(read)) == 1 and (read[0].width, read[0].height) == (6, 4)
    assert read[0].data == data and EncodedImage.from_any(read[0]) is read[0]
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    for value in (Image.open(io.BytesIO(data)), pixels):
        assert np.array_equal(np.asarray(EncodedImage.from_any(value).pil()), pixels)
    assert EncodedImage.from_any(read[0].data_url) == read[0]
    assert len(pickle.dumps([read[0]] * 50)) < len(data) + 1000


def test_pixels_are_rgb_and_what_is_transparent_is_white():
    clear = Image.new("RGBA", (2, 2), (9, 9, 9, 0))
    assert np.asarray(EncodedImage.from_any(clear).pil()).min() == 255
    grey = EncodedImage.from_any(np.full((3, 3), 7, np.uint8)).pil()
    assert grey.mode == "RGB" and grey.getpixel((0, 0)) == (7, 7, 7)


@pytest.mark.parametrize(
    ("value", "token"),
    [
        (bomb(60_000, 60_000), "too large|pixels"),
        (bomb(12_000, 9_000), "too large|pixels"),
        (bomb(7_000, 6_000), "pixels"),
        (png()[:40], "broken"),
        (png(200, 200)[:-20], "broken"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "SVG"),
        ("data:image/svg+xml;base64," + base64.b64encode(b"<svg onload='x'/>").decode(), "SVG"),
        (b"", "0 bytes"),
        (b"GIF89a", "broken"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image"),
        ("data:image/png;base64,!!!", "no base64"),
        ("data:image/png,abc", "base64"),
        ("https://images.example/x.png", "remote"),
        ("ftp://images.example/x.png", "ftp"),
        ("/nowhere/x.png", "cannot be read"),
        ("a\0b", "cannot be read"),
        ("/dev/zero", "no plain file"),
        (np.zeros((2, 2, 3)), "uint8"),
        (np.zeros((2, 2, 7), np.uint8), "uint8"),
        (7, "int"),
        ({"bytes": None, "path": None}, "dict"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_hostile_or_broken_is_named(value, token):
    with pytest.raises(DataError, match=f"(?s)prompt 3, image 1.*({token})"):
        EncodedImage.from_any(value, "prompt 3, image 1")


def test_limits_on_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(encoded, "MOST_BYTES", 50)
    (path := tmp_path / "x.png").write_bytes(png())
    for value in (png(), path):
        with pytest.raises(DataError, match="at most 50"):
            EncodedImage.from_any(value)


def test_broken_pixels_behind_a_whole_header_are_a_data_error():
    broken = EncodedImage.from_any(png(400, 400, kind="JPEG")[:-300])
    with pytest.raises(DataError, match=broken.digest[:8]):
        broken.pil()


def test_remote_is_read_when_asked():
    data = png()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/x.png" else 404)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        assert EncodedImage.from_any(f"{address}/x.png", fetch=True).data == data
        with pytest.raises(DataError, match="404"):
            EncodedImage.from_any(f"{address}/y.png", fetch=True)
        with pytest.raises(DataError, match="remote"):
            EncodedImage.from_any(f"{address}/x.png")
    finally:
        server.shutdown()
        server.server_close()
