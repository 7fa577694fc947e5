"""Blocks of a protocol buffer, by the numbers of their fields."""


def fields(data):
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 2:
            length = varint()
            yield key >> 3, data[at:at + length]
            at += length
        elif key & 7 == 0:
            varint()
        else:
            at += 4 if key & 7 == 5 else 8


def block_in(data, *path):
    """The block of the first of these fields, in it that of the second, and so on."""
    for number in path:
        data = next(block for field, block in fields(data) if field == number)
    return data
